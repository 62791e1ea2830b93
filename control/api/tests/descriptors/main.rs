//! The interface is committed as descriptors, so that whoever was built against it goes on working. The file
//! `descriptors/provider.v1.binpb` is a FileDescriptorSet, which tools such as grpcurl read. Fields, values and methods may be
//! added, never removed, renumbered, renamed or given another type. After an addition,
//! `HARMONAIZE_GOLDEN=write cargo test -p harmonaize-api` writes the file anew; what breaks a promise is refused then too, and
//! needs a package of the next version. The file has all of every release, whose name is in `.release`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod promises;

use promises::{broken, promises};
use prost::Message;
use prost_types::FileDescriptorSet;
use std::path::{Path, PathBuf};

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("descriptors/provider.v1.binpb")
}

/// As the sources say, without comments and positions.
fn compiled() -> FileDescriptorSet {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let folder = sources.join("harmonaize/provider/v1");
    let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|ext| ext == "proto")).collect();
    files.sort();
    let mut set = protox::compile(&files, [&sources]).unwrap();
    set.file.iter_mut().for_each(|file| file.source_code_info = None);
    set.file.sort_by(|one, other| one.name().cmp(other.name()));
    set
}

#[test]
fn the_interface_keeps_what_it_promised() {
    let now = compiled();
    let known = std::fs::read(file()).unwrap_or_default();
    let before = FileDescriptorSet::decode(known.as_slice()).unwrap();
    let broken = broken(&promises(&before), &promises(&now));
    assert!(
        broken.is_empty(),
        "agents and tools of the release before would break:\n- {}\nLeave these as they are, and add what is new beside them: a field with \
         a number of its own, whose absence means what was before. Test: cargo test -p harmonaize-api",
        broken.join("\n- ")
    );
    if std::env::var_os("HARMONAIZE_GOLDEN").is_some_and(|wish| wish == "write") {
        std::fs::write(file(), now.encode_to_vec()).unwrap();
        return;
    }
    assert!(
        before == now,
        "descriptors/provider.v1.binpb is not up to date; `HARMONAIZE_GOLDEN=write cargo test -p harmonaize-api` writes it"
    );
}

const SOURCE: &str = r#"
syntax = "proto3";
package p.v1;
service Provider { rpc Session(stream Hello) returns (stream Hello); rpc Status(Hello) returns (Hello); }
message Hello {
  uint32 version = 1;
  string host = 2;
  repeated uint64 ports = 3;
  oneof message { Inner inner = 4; Kind kind = 5; }
  message Inner { bool yes = 1; }
}
enum Kind { KIND_UNSPECIFIED = 0; KIND_ONE = 1; }
"#;

/// What a change of the source breaks.
fn change(from: &str, to: &str) -> Vec<String> {
    let compile = |text: &str| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("p.proto"), text).unwrap();
        promises(&protox::compile(["p.proto"], [folder.path()]).unwrap())
    };
    assert!(SOURCE.contains(from), "{from}");
    broken(&compile(SOURCE), &compile(&SOURCE.replacen(from, to, 1)))
}

#[test]
fn additions_break_nothing() {
    assert_eq!(change("string host = 2;", "string host = 2; bytes more = 9;"), Vec::<String>::new());
    assert_eq!(change("KIND_ONE = 1;", "KIND_ONE = 1; KIND_TWO = 2;"), Vec::<String>::new());
    assert_eq!(change("Kind kind = 5;", "Kind kind = 5; string more = 6;"), Vec::<String>::new());
    let more = "rpc Status(Hello) returns (Hello); rpc More(Hello) returns (Hello);";
    assert_eq!(change("rpc Status(Hello) returns (Hello);", more), Vec::<String>::new());
    assert_eq!(change("enum Kind", "message New { bool yes = 1; } enum Kind"), Vec::<String>::new());
}

#[test]
fn what_breaks_is_named() {
    let cases = [
        ("string host = 2;", "", "field 2 of p.v1.Hello is gone; it was string host"),
        ("string host = 2;", "string host = 7;", "field 2 of p.v1.Hello is gone; it was string host"),
        ("string host = 2;", "string name = 2;", "field 2 of p.v1.Hello is string name; it was string host"),
        ("string host = 2;", "bytes host = 2;", "field 2 of p.v1.Hello is bytes host; it was string host"),
        (
            "string host = 2;",
            "repeated string host = 2;",
            "field 2 of p.v1.Hello is repeated string host; it was",
        ),
        (
            "string host = 2;",
            "optional string host = 2;",
            "field 2 of p.v1.Hello is optional string host; it was",
        ),
        (
            "Inner inner = 4;",
            "",
            "field 4 of p.v1.Hello is gone; it was p.v1.Hello.Inner inner in oneof message",
        ),
        (
            "Inner inner = 4; Kind kind = 5; }",
            "Inner inner = 4; } Kind kind = 5;",
            "field 5 of p.v1.Hello is p.v1.Kind",
        ),
        ("bool yes = 1;", "bool no = 1;", "field 1 of p.v1.Hello.Inner is bool no"),
        ("KIND_ONE = 1;", "", "value 1 of p.v1.Kind is gone"),
        ("KIND_ONE = 1;", "KIND_ONE = 3;", "value 1 of p.v1.Kind is gone"),
        ("rpc Status(Hello) returns (Hello);", "", "method Status of p.v1.Provider is gone"),
        (
            "returns (stream Hello)",
            "returns (Hello)",
            "method Session of p.v1.Provider is stream p.v1.Hello -> p.v1.Hello",
        ),
    ];
    for (from, to, expected) in cases {
        let broken = change(from, to);
        assert!(broken.len() == 1 && broken[0].starts_with(expected), "{from} -> {to}: {broken:?}");
    }
}
