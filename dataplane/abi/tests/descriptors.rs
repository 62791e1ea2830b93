//! The tenants' interface is committed as a description (`descriptors/tenant.vN.txt`): every structure that crosses between a tenant's
//! process and its agent, with fields and variants in the order on which its encoding depends, and the numbers of what is told by
//! number. Any change of it needs another [`ABI_VERSION`], and so another file: `HARMONAIZE_GOLDEN=write cargo test -p
//! harmonaize-abi` writes it, and never over one that is there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{ABI_VERSION, Collective, Dtype, ReduceOp, Status};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use syn::{Attribute, Fields, Item};

/// Where the structures are: of the descriptors in rings, and of messages.
const SOURCES: [&str; 15] = [
    "collective.rs",
    "congestion.rs",
    "descriptor.rs",
    "element.rs",
    "p2p.rs",
    "session.rs",
    "session/auth.rs",
    "session/budget.rs",
    "session/constraints.rs",
    "session/event.rs",
    "session/hints.rs",
    "session/knobs.rs",
    "session/offer.rs",
    "session/region.rs",
    "session/request_error.rs",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// Whether an item is one that is encoded, message or bytes in shared memory.
fn is_encoded(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|one| one.path().is_ident("derive")).any(|one| {
        let mut found = false;
        let _ = one.parse_nested_meta(|meta| {
            found |= meta
                .path
                .segments
                .last()
                .is_some_and(|last| last.ident == "Serialize" || last.ident == "IntoBytes");
            Ok(())
        });
        found
    })
}

/// Without what is for people and for the compiler.
fn bare(fields: &mut Fields) {
    fields.iter_mut().for_each(|field| field.attrs.clear());
}

/// The structures of a source that are encoded.
fn structures(source: &str) -> Vec<Item> {
    let items = syn::parse_file(source).unwrap().items.into_iter();
    items
        .filter_map(|item| match item {
            Item::Struct(mut one) if is_encoded(&one.attrs) => {
                one.attrs.clear();
                bare(&mut one.fields);
                Some(Item::Struct(one))
            }
            Item::Enum(mut one) if is_encoded(&one.attrs) => {
                one.attrs.clear();
                for variant in &mut one.variants {
                    variant.attrs.clear();
                    bare(&mut variant.fields);
                }
                Some(Item::Enum(one))
            }
            _ => None,
        })
        .collect()
}

fn described() -> String {
    let mut text = format!("// Version {ABI_VERSION}.\n");
    for source in SOURCES {
        let items = structures(&std::fs::read_to_string(root().join("src").join(source)).unwrap());
        assert!(!items.is_empty(), "{source} has nothing that is encoded");
        let file = syn::File { shebang: None, attrs: Vec::new(), items };
        write!(text, "\n// {source}\n{}", prettyplease::unparse(&file)).unwrap();
    }
    text += "\n// Numbers\n";
    let statuses =
        (0..=u16::MAX).filter_map(|code| Some((u32::from(code), format!("{:?}", Status::from_code(code)?))));
    let of = |name: &str, all: Vec<(u32, String)>| {
        all.iter().fold(format!("{name}:"), |line, (code, name)| format!("{line} {code} {name}"))
    };
    let byte = |call: &dyn Fn(u8) -> Option<String>| {
        (0..=u8::MAX).filter_map(|code| Some((u32::from(code), call(code)?))).collect()
    };
    let lines = [
        of("Status", statuses.collect()),
        of("Collective", byte(&|code| Some(format!("{:?}", Collective::from_code(code)?)))),
        of("Dtype", byte(&|code| Some(format!("{:?}", Dtype::from_code(code)?)))),
        of("ReduceOp", byte(&|code| Some(format!("{:?}", ReduceOp::from_code(code)?)))),
    ];
    text + &lines.join("\n") + "\n"
}

#[test]
fn a_changed_message_has_another_version() {
    let folder = root().join("descriptors");
    let path = folder.join(format!("tenant.v{ABI_VERSION}.txt"));
    let now = described();
    if !path.exists() && std::env::var_os("HARMONAIZE_GOLDEN").is_some_and(|wish| wish == "write") {
        std::fs::create_dir_all(&folder).unwrap();
        for old in std::fs::read_dir(&folder).unwrap() {
            std::fs::remove_file(old.unwrap().path()).unwrap();
        }
        std::fs::write(&path, &now).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == now,
        "messages are not those of version {ABI_VERSION}: raise ABI_VERSION, and HARMONAIZE_GOLDEN=write describes them anew.\n{now}"
    );
}

#[test]
fn every_source_with_messages_is_described() {
    let mut known: Vec<PathBuf> = SOURCES.iter().map(|source| root().join("src").join(source)).collect();
    known.sort();
    let folders = [root().join("src"), root().join("src/session")];
    let files =
        folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()).map(|file| file.unwrap().path());
    let mut found: Vec<PathBuf> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .filter(|path| !structures(&std::fs::read_to_string(path).unwrap()).is_empty())
        .collect();
    found.sort();
    assert_eq!(found, known);
}

#[test]
fn what_is_encoded_is_told_from_what_is_not() {
    let source = "/// A.\n#[derive(Clone, Serialize)] struct A { /// One.\n one: u8, two: u16 }\n#[derive(Clone)] struct B;\n\
                  #[derive(zerocopy::IntoBytes)] #[repr(C)] enum C { X = 1, Y { z: u8 } }";
    let file = syn::File { shebang: None, attrs: Vec::new(), items: structures(source) };
    assert_eq!(
        prettyplease::unparse(&file),
        "struct A {\n    one: u8,\n    two: u16,\n}\nenum C {\n    X = 1,\n    Y { z: u8 },\n}\n"
    );
}
