//! A local authority: makes certificates for a deployment that has none.

use crate::folder::read;
use crate::{Error, Folder};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData,
    RevokedCertParams, SanType, SerialNumber,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use std::collections::BTreeMap;
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use time::{Duration, OffsetDateTime};
use webpki::{BorrowedCertRevocationList, EndEntityCert, KeyUsage};
use x509_parser::parse_x509_certificate;

/// How long an authority is trusted.
const AUTHORITY_AGE: Duration = Duration::days(3650);
/// How long another certificate is good.
const CERTIFICATE_AGE: Duration = Duration::days(365);
/// How far clocks may be behind.
const SKEW: Duration = Duration::days(1);

/// What a certificate is for: nobody can be control by an agent's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Control's end of sessions, and of its connections with etcd.
    Control,
    /// The end of an agent, an aggregator or an operator.
    Session,
    /// A member of etcd at this address: its end with control, and both its ends with other members.
    Etcd(IpAddr),
}

/// An authority, with its key.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    own: CertificateDer<'static>,
    /// Who trusts it trusts these: its own, and perhaps those of others.
    trusted: String,
    key: String,
}

impl Authority {
    /// A new one, which nobody trusts yet.
    ///
    /// # Errors
    /// If the system gives no randomness.
    pub fn create() -> Result<Self, Error> {
        let made = || {
            let key = KeyPair::generate()?;
            // Lists of revoked certificates go by their authority's name, and so each has another.
            let end = key.der_bytes().last_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes));
            let params = authority_params(&format!("harmonaize authority {end:016x}"));
            let certificate = params.self_signed(&key)?;
            let (own, trusted, text) = (certificate.der().clone(), certificate.pem(), key.serialize_pem());
            Ok(Self { issuer: Issuer::new(params, key), own, trusted, key: text })
        };
        made().map_err(|error| cannot(Path::new("authority"), &error))
    }

    /// The one of a folder, `ca.crt` and `ca.key`.
    ///
    /// # Errors
    /// If a file cannot be read, or the key is none.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let text = |path: PathBuf| {
            let bytes = read(&path)?;
            String::from_utf8(bytes).map_err(|_| Error::Content { path, why: "this is no PEM".to_owned() })
        };
        let key = text(folder.join("ca.key"))?;
        let trusted = text(folder.join("ca.crt"))?;
        let pair = KeyPair::from_pem(&key).map_err(|error| cannot(&folder.join("ca.key"), &error))?;
        let none =
            || Error::Content { path: folder.join("ca.crt"), why: "no certificate is of ca.key".into() };
        let (own, name) = own(&trusted, &pair).ok_or_else(none)?;
        Ok(Self { issuer: Issuer::new(authority_params(&name), pair), own, trusted, key })
    }

    /// Writes `ca.crt` and `ca.key` into a folder, which is made.
    ///
    /// # Errors
    /// If one cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), Error> {
        write(&folder.join("ca.key"), &self.key, 0o600)?;
        write(&folder.join("ca.crt"), &self.trusted, 0o644)
    }

    /// Makes a certificate with a DNS name, and its key.
    ///
    /// # Errors
    /// If the name is none that a certificate can have.
    pub fn issue(&self, name: &str, purpose: Use) -> Result<Issued, Error> {
        self.issue_for(name, purpose, CERTIFICATE_AGE.unsigned_abs())
    }

    /// The same, of one that ends `age` from now; ten years at most.
    ///
    /// # Errors
    /// As of [`Authority::issue`].
    pub fn issue_for(&self, name: &str, purpose: Use, age: std::time::Duration) -> Result<Issued, Error> {
        if !is_certificate_name(name) {
            let why = "a certificate's name has letters, digits, `-`, `_` and dots between them".to_owned();
            return Err(Error::Content { path: name.into(), why });
        }
        let made = || {
            let key = KeyPair::generate()?;
            let mut params = dated(Duration::try_from(age).unwrap_or(AUTHORITY_AGE).min(AUTHORITY_AGE));
            params.distinguished_name = named(name);
            params.subject_alt_names = vec![SanType::DnsName(name.try_into()?)];
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            if purpose != Use::Session {
                params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
            }
            if let Use::Etcd(address) = purpose {
                // Members connect with each other by address.
                params.subject_alt_names.push(SanType::IpAddress(address));
            }
            params.use_authority_key_identifier_extension = true;
            let certificate = params.signed_by(&key, &self.issuer)?;
            Ok((certificate.pem(), key.serialize_pem()))
        };
        let (certificate, key) = made().map_err(|error| cannot(Path::new(name), &error))?;
        Ok(Issued { authorities: self.trusted.clone(), certificate, key })
    }
}

impl Authority {
    /// Adds certificates of this authority, each a PEM file, to its list of those that are revoked. The list is made where it is not
    /// there. Returns how many are on it then.
    ///
    /// # Errors
    /// If a file cannot be read or written, is none, or is of another authority: nothing has changed then.
    pub fn revoke(&self, list: &Path, certificates: &[PathBuf]) -> Result<usize, Error> {
        let now = OffsetDateTime::now_utc();
        let mut revoked = if list.exists() { revoked(list)? } else { BTreeMap::new() };
        for path in certificates {
            revoked.entry(self.serial(path)?).or_insert(now);
        }
        let count = revoked.len();
        let revoked_certs = revoked.into_iter().map(|(serial, at)| RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: at,
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: now - SKEW,
            // Who checks it goes on with the last that he has.
            next_update: now + AUTHORITY_AGE,
            crl_number: SerialNumber::from(now.unix_timestamp().unsigned_abs()),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let text = params.signed_by(&self.issuer).and_then(|list| list.pem());
        write(list, &text.map_err(|error| cannot(list, &error))?, 0o644)?;
        Ok(count)
    }

    /// The serial number of a certificate that this authority has signed.
    fn serial(&self, path: &Path) -> Result<Vec<u8>, Error> {
        let content = |why: String| Error::Content { path: path.to_owned(), why };
        let parse =
            |bytes: &[u8]| CertificateDer::from_pem_slice(bytes).map_err(|error| content(error.to_string()));
        let other = parse(&read(path)?)?;
        let checked = || {
            let anchor = webpki::anchor_from_trusted_cert(&self.own)?;
            let certificate = EndEntityCert::try_from(&other)?;
            let usage = KeyUsage::client_auth();
            let algorithms = webpki::ALL_VERIFICATION_ALGS;
            certificate.verify_for_usage(algorithms, &[anchor], &[], UnixTime::now(), usage, None, None)?;
            Ok(certificate.serial().to_vec())
        };
        checked()
            .map_err(|error: webpki::Error| content(format!("no certificate of this authority: {error}")))
    }
}

/// Serial numbers of a list, and since when each is on it.
fn revoked(list: &Path) -> Result<BTreeMap<Vec<u8>, OffsetDateTime>, Error> {
    let content = |why: String| Error::Content { path: list.to_owned(), why };
    let der = CertificateRevocationListDer::from_pem_slice(&read(list)?);
    let der = der.map_err(|error| content(error.to_string()))?;
    let parsed = BorrowedCertRevocationList::from_der(&der).map_err(|error| content(error.to_string()))?;
    let each = parsed.into_iter().map(|entry| {
        let entry = entry.map_err(|error| content(error.to_string()))?;
        let since = i64::try_from(entry.revocation_date.as_secs()).unwrap_or(i64::MAX);
        let since = OffsetDateTime::from_unix_timestamp(since).map_err(|error| content(error.to_string()))?;
        Ok((entry.serial_number.to_vec(), since))
    });
    each.collect()
}

/// Whether it is a DNS name, of at most 253 bytes; so it is the name of a folder too.
fn is_certificate_name(name: &str) -> bool {
    let label = |label: &str| {
        let mut bytes = label.bytes();
        (1..=63).contains(&label.len()) && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// What an identity's folder holds, all PEM.
pub struct Issued {
    authorities: String,
    certificate: String,
    key: String,
}

impl Issued {
    /// Each file's path in a folder, text and mode.
    pub fn files(&self, folder: &Folder) -> [(PathBuf, &str, u32); 3] {
        [
            (folder.authorities(), &self.authorities, 0o644),
            (folder.key(), &self.key, 0o600),
            (folder.certificate(), &self.certificate, 0o644),
        ]
    }

    /// Writes them into a folder, which is made. Those that are there are replaced one by one: who reads them meanwhile may find
    /// a key that is not the certificate's, and tries again.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, folder: &Folder) -> Result<(), Error> {
        self.files(folder).into_iter().try_for_each(|(path, text, mode)| write(&path, text, mode))
    }
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issued").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

/// The same at each start, so that what a reopened authority signs names the same signer.
fn authority_params(name: &str) -> CertificateParams {
    let mut params = dated(AUTHORITY_AGE);
    params.distinguished_name = named(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// Of the certificates in a PEM text the one of this key, and the name in it.
fn own(text: &str, key: &KeyPair) -> Option<(CertificateDer<'static>, String)> {
    let name = |der: &CertificateDer<'_>| {
        let (_, certificate) = parse_x509_certificate(der).ok()?;
        let same = *certificate.public_key().subject_public_key.data == *key.der_bytes();
        let name = certificate.subject().iter_common_name().next()?.as_str().ok()?;
        same.then(|| name.to_owned())
    };
    let mut all = CertificateDer::pem_slice_iter(text.as_bytes()).flatten();
    all.find_map(|der| name(&der).map(|name| (der, name)))
}

fn dated(age: Duration) -> CertificateParams {
    let now = OffsetDateTime::now_utc();
    let mut params = CertificateParams::default();
    params.not_before = now - SKEW;
    params.not_after = now + age;
    params
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn cannot(path: &Path, error: &rcgen::Error) -> Error {
    Error::Content { path: path.to_owned(), why: error.to_string() }
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    write_file(path, text.as_bytes(), mode)
}

/// Writes a file whole or not at all, in the place of one of that name. Folders above it are made.
///
/// # Errors
/// Where the system does not let it be written.
pub fn write_file(path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
    let part = path.with_extension("part");
    let written = || {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        match std::fs::remove_file(&part) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&part, path)
    };
    written().map_err(|source| Error::File { path: path.to_owned(), source })
}
