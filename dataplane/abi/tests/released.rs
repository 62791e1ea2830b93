//! Numbers, sizes and bytes of the tenants' interface are those that were released. Processes that were built at one release run with
//! the agents of the next. The structures themselves are in `tests/schemas/released/tenants.txt`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::session::{
    ALL_EVENTS, Access, Answer, Event, EventBatch, EventCursor, EventKind, Hello, MAGIC, Request, Welcome,
    encode, encode_first,
};
use harmonaize_abi::{
    ABI_VERSION, Collective, Completion, Direction, Dtype, Rank, ReduceOp, Region, Status, StragglerCause,
    Submission,
};
use harmonaize_schemas::{Schema, bytes, check};
use zerocopy::IntoBytes;

const REMEDY: &str = "Processes that were built at the release before could not use this agent any more. Leave numbers and layouts as \
    they are, and add behind them: a new code, a new `Request` with an `Answer` of its own, a flag in what was reserved. If that cannot \
    be, raise ABI_VERSION, have agents go on with ABI_VERSION - 1 (`session::Connection`, `engine::validate`), and only then begin this \
    file anew. Test: cargo test -p harmonaize-abi --test released";

/// The field that lies at each byte: a structure all of whose other fields are zero shows which it is.
macro_rules! layout {
    ($type:ident: $($field:ident)*) => {{
        let mut lines = vec![format!("{} has {} bytes", stringify!($type), size_of::<$type>())];
        $(lines.push(format!("{}.{} at {}", stringify!($type), stringify!($field), std::mem::offset_of!($type, $field)));)*
        // None may be missing here.
        let $type { $($field: _),* } = $type::default();
        lines
    }};
}

fn layouts() -> Vec<String> {
    let mut lines = layout!(Region: offset bytes);
    lines.extend(layout!(Submission: version collective dtype reduce flags tensor_class priority communicator root cookie count
        input output deadline_ns iteration residual_in residual_out timeout_ns factor));
    lines.extend(layout!(Completion: version status communicator cookie operation wire_bytes bits_per_element_x256 algorithm fallback
        reserved1 error measured_error codec reserved2 peer reserved3));
    lines
}

fn numbers() -> Vec<String> {
    let mut lines = vec![format!("ABI_VERSION {ABI_VERSION}")];
    let mut add = |of: &str, code: u16, name: Option<String>| {
        lines.extend(name.map(|name| format!("{of} {code} {name}")));
    };
    for code in 0..=u16::MAX {
        add("Status", code, Status::from_code(code).map(|one| format!("{one:?}")));
    }
    for code in 0..=u8::MAX {
        add("Collective", code.into(), Collective::from_code(code).map(|one| format!("{one:?}")));
        add("Direction", code.into(), Direction::from_code(code).map(|one| format!("{one:?}")));
        add("Dtype", code.into(), Dtype::from_code(code).map(|one| format!("{one:?}")));
        add("ReduceOp", code.into(), ReduceOp::from_code(code).map(|one| format!("{one:?}")));
    }
    for (code, name) in harmonaize_abi::CODECS.iter().enumerate() {
        lines.push(format!("Codec {code} {name}"));
    }
    lines
}

fn examples() -> Vec<String> {
    let hello = Hello { access: Access::Mapped, arena_bytes: 1 << 20, entries: 64 };
    let welcome = Welcome { arena_bytes: 1 << 20, entries: 64, communicators: 8, operation_timeout_ns: 600 };
    let leave = Request::Leave { id: 300, communicator: 7 };
    let region = Region { offset: 1, bytes: 2 };
    let kind = EventKind::Stragglers { cause: StragglerCause::Network, ranks: vec![Rank(3)] };
    let event = Event { number: 1, communicator: "job".to_owned(), kind, since_ns: 9 };
    let batch = EventBatch { missed: 0, events: vec![event], cursor: EventCursor { feed: 7, next: 2 } };
    let id = 300 | ALL_EVENTS;
    vec![
        bytes("magic", &MAGIC),
        bytes("Hello", &encode_first(&hello).unwrap()),
        bytes("Welcome", &encode_first(&Ok::<_, ()>(welcome)).unwrap()),
        bytes("Request::Leave", &encode(&leave).unwrap()),
        bytes("Answer::Left", &encode(&Answer::Left { id: 300 }).unwrap()),
        bytes("Region", region.as_bytes()),
        bytes("Request::Events", &encode(&Request::Events { id, from: None, wait_ns: 5 }).unwrap()),
        bytes("Answer::AllEvents", &encode(&Answer::AllEvents { id, read: Ok(batch.into()) }).unwrap()),
    ]
}

#[test]
fn numbers_layouts_and_bytes_are_those_released() {
    let lines = [numbers(), layouts(), examples()].concat();
    check("tenants-numbers", Schema::Grows, &lines, REMEDY).unwrap_or_else(|broken| panic!("{broken}"));
}
