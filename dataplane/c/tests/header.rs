//! The header is what cbindgen makes of the sources: `HARMONAIZE_GOLDEN=write cargo test -p harmonaize-c` writes it anew.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use std::path::Path;

#[test]
fn the_header_is_made_from_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let builder = cbindgen::Builder::new().with_config(config).with_src(root.join("src/lib.rs"));
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    harmonaize_testkit::golden::same("dataplane/c/include/harmonaize.h", &String::from_utf8(made).unwrap());
}
