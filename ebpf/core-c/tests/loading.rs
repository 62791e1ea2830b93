//! The programs that read the kernel's structures, loaded into this kernel; and what is said where they cannot be.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_core_c::{Error, OBJECT, Options, TracepointMode, Tracing};
use rustix::thread::CapabilitySet;
use std::path::Path;

/// The programs; none, loudly, where the privilege or the kernel's support is missing.
fn open(options: Options) -> Option<Tracing> {
    let object = std::env::var_os("HARMONAIZE_EBPF_OBJECTS").map(|folder| {
        let name = format!("endpoints-{}.o", std::env::consts::ARCH);
        std::fs::read(Path::new(&folder).join(name)).unwrap().into()
    });
    match Tracing::open(&Options { object, ..options }) {
        Ok(tracing) => Some(tracing),
        Err(error @ (Error::Types { .. } | Error::Denied { .. })) => {
            harmonaize_testkit::strict::skip_test(format_args!("it loads programs into the kernel: {error}"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn sockets_are_followed_with_types_and_without() {
    let types = Path::new("/sys/kernel/btf/vmlinux");
    for (given, how) in [(None, TracepointMode::Typed), (Some(types.to_owned()), TracepointMode::Untyped)] {
        let Some(tracing) = open(Options { types: given, ..Options::default() }) else { return };
        assert_eq!(tracing.tcp(), Some(how), "{:?}", tracing.missing());
        assert!(
            tracing.sockets().is_ok()
                && tracing.queue_pairs().is_ok()
                && !tracing.losses().unwrap().is_empty()
        );
        let loaded: Vec<String> = tracing.programs().map(|(name, _)| name).collect();
        let suffix = if how == TracepointMode::Typed { "_typed" } else { "_untyped" };
        assert_eq!(loaded.iter().filter(|name| name.ends_with(suffix)).count(), 3, "{loaded:?}");
        // Either is there, or it is said that it is not.
        assert_ne!(tracing.rdma(), tracing.missing().iter().any(|missing| missing.what == "queue pairs"));
    }
}

#[test]
fn a_kernel_without_types_is_named() {
    let error =
        Tracing::open(&Options { types: Some("/no/such/file".into()), ..Options::default() }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no type information of this kernel at /no/such/file; a file of it for this kernel may be given instead"
    );
}

#[test]
fn objects_that_are_none_are_refused() {
    for bytes in [Vec::new(), b"not an object".to_vec(), OBJECT[..OBJECT.len() / 2].to_vec()] {
        let options = Options { object: Some(bytes.into()), ..Options::default() };
        let error = Tracing::open(&options).unwrap_err();
        assert!(matches!(error, Error::Object { .. } | Error::Types { .. }), "{error}");
    }
}

#[test]
fn what_the_kernel_denies_is_said() {
    if open(Options::default()).is_none() {
        return;
    }
    // Capabilities are a thread's own.
    let asked = std::thread::spawn(|| {
        let mut own = rustix::thread::capabilities(None).unwrap();
        own.effective.remove(CapabilitySet::BPF | CapabilitySet::SYS_ADMIN | CapabilitySet::PERFMON);
        rustix::thread::set_capabilities(None, own).unwrap();
        Tracing::open(&Options::default()).unwrap_err()
    });
    let error = asked.join().unwrap();
    assert!(matches!(error, Error::Denied { .. }), "{error}");
}
