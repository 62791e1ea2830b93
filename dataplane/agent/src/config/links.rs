//! The part of the configuration that says how links to other agents are protected, and their packets marked.

use harmonaize_transport::tcp::{Dscp, LinkProtection};
use serde::Deserialize;
use std::collections::BTreeMap;

/// How links to other agents go over TCP.
#[derive(Clone, Copy, Debug)]
pub struct Links {
    /// How what crosses them is protected. All agents of a communicator must do the same.
    pub protection: LinkProtection,
    /// How packets are marked by the class of what their link carries, if at all.
    pub dscp: Option<Dscp>,
}

/// What is left out is as usual.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct FileLinks {
    protection: FileProtection,
    dscp: Option<BTreeMap<FileClass, CodePoint>>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FileProtection {
    None,
    #[default]
    Authenticated,
    Encrypted,
}

/// As tenants' operations have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FileClass {
    Latency,
    Normal,
    Bulk,
}

/// A code point of differentiated services, six bits.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "u8")]
struct CodePoint(u8);

impl TryFrom<u8> for CodePoint {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        if number < 64 { Ok(Self(number)) } else { Err("a DSCP is from 0 to 63") }
    }
}

impl FileLinks {
    /// What is asked for.
    pub(super) fn links(&self) -> Links {
        let protection = match self.protection {
            FileProtection::None => LinkProtection::None,
            FileProtection::Authenticated => LinkProtection::Authenticated,
            FileProtection::Encrypted => LinkProtection::Encrypted,
        };
        let dscp = self.dscp.as_ref().map(|marks| {
            let of = |class| marks.get(&class).map_or(0, |code_point| code_point.0);
            Dscp([of(FileClass::Latency), of(FileClass::Normal), of(FileClass::Bulk)])
        });
        Links { protection, dscp }
    }
}
