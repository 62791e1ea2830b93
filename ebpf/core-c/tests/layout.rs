//! The structures that the programs write, in C, are those that are read, field by field.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_events::{EndpointLosses, QueuePair, QueuePairKey, Socket, SocketKey};

/// A field's name, offset and bytes.
type Field = (String, usize, usize);

/// The fields of a structure of the header, laid out as C does, and the bytes of all.
fn in_c(name: &str) -> (Vec<Field>, usize) {
    let header = include_str!("../programs/schema.h");
    let (_, body) = header.split_once(&format!("struct {name} {{")).unwrap();
    let (body, _) = body.split_once('}').unwrap();
    let (mut fields, mut end, mut alignment) = (Vec::new(), 0_usize, 1);
    for line in body.split(';').map(str::trim).filter(|line| !line.is_empty()) {
        let (kind, field) = line.split_once(' ').unwrap();
        let size = kind.strip_prefix('u').unwrap().parse::<usize>().unwrap() / 8;
        let (field, count) = match field.split_once('[') {
            Some((field, count)) => (field, count.trim_end_matches(']').parse().unwrap()),
            None => (field, 1),
        };
        let offset = end.next_multiple_of(size);
        fields.push((field.to_owned(), offset, size * count));
        end = offset + size * count;
        alignment = alignment.max(size);
    }
    (fields, end.next_multiple_of(alignment))
}

macro_rules! in_rust {
    ($name:ident: $($field:ident)*) => {{
        fn bytes<T>(_: impl FnOnce($name) -> T) -> usize {
            size_of::<T>()
        }
        let fields = vec![$((
            stringify!($field).to_owned(),
            std::mem::offset_of!($name, $field),
            bytes(|whole: $name| whole.$field),
        )),*];
        assert_eq!(in_c(stringify!($name)), (fields, size_of::<$name>()), stringify!($name));
    }};
}

#[test]
fn both_sides_have_the_same_structures() {
    in_rust!(SocketKey: local remote local_port remote_port namespace);
    in_rust!(Socket: time_ns cgroup srtt_ns rttvar_ns min_rtt_ns delivery_rate acknowledged received
        retransmitted_bytes not_sent segments retransmissions unacknowledged lost congestion_window ssthresh
        peer_window delivered delivered_ce segment_size user state samples);
    in_rust!(QueuePairKey: device number);
    in_rust!(QueuePair: created_ns changed_ns destroyed_ns cgroup process user state peer local remote kind reserved
        device name);
    in_rust!(EndpointLosses: sockets sockets_unplaced queue_pairs queue_pairs_unplaced);
}
