//! Support for these tests: a collector where there can be one, and packets.
#![allow(dead_code)] // each test uses some of it

pub(crate) mod budget;
pub(crate) mod model;
pub(crate) mod packets;

use harmonaize_loader::{EndpointOptions, Error, Options, Programs};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};

/// The file of an object: the committed one, or one built a moment ago.
pub(crate) fn object(name: &str) -> PathBuf {
    match std::env::var_os("HARMONAIZE_EBPF_OBJECTS") {
        Some(folder) => PathBuf::from(folder).join(name),
        None => committed(name),
    }
}

/// A file that is committed beside the objects.
pub(crate) fn committed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../objects").join(name)
}

/// The programs, loaded; `None`, loudly, where the privilege or the kernel's support is missing.
pub(crate) fn collector(options: Options) -> Option<Programs> {
    let name = if options.diagnosis { "diagnosis.o" } else { "telemetry.o" };
    let object = std::fs::read(object(name)).unwrap();
    let endpoints = options.endpoints.map(|endpoints| {
        let name = format!("endpoints-{}.o", std::env::consts::ARCH);
        let object = std::fs::read(self::object(&name)).unwrap();
        EndpointOptions { object: Some(object.into()), ..endpoints }
    });
    let options = Options { object: Some(object.into()), endpoints, ..options };
    match Programs::open(&options) {
        Ok(collector) => Some(collector),
        Err(error @ (Error::Privilege { .. } | Error::Kernel { .. } | Error::Denied { .. })) => {
            harmonaize_testkit::strict::skip_test(format_args!("it loads programs into the kernel: {error}"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A seed from `SEED`, or a new one; printed, so that a failure can be run again.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| RandomState::new().build_hasher().finish());
    eprintln!("SEED={seed}");
    seed
}
