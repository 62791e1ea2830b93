//! A transport that spoils chunks on their way out.

use crate::tap::{Hooks, Tap};
use harmonaize_abi::{View, ViewMut};
use harmonaize_codec::{Codec, encode};
use harmonaize_shm::Span;
use harmonaize_transport::Transport;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is wrong with a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Damage {
    /// It ends early.
    Cut,
    /// It begins with something else.
    Magic,
    /// A byte of its header is another one.
    Header,
    /// It has one element less.
    Count,
    /// It is of another codec.
    Codec,
}

impl Damage {
    pub(crate) const ALL: [Self; 5] = [Self::Cut, Self::Magic, Self::Header, Self::Count, Self::Codec];

    /// A word of what is told of it.
    pub(crate) fn expected_text(self) -> &'static str {
        match self {
            Self::Cut => "which needs",
            Self::Magic => "no chunk: it begins",
            Self::Header => "header is damaged",
            Self::Count => "elements where",
            Self::Codec => "not the codec",
        }
    }

    fn done_to(self, span: &Span) -> Span {
        let mut chunk = vec![0; span.bytes()];
        let at = span.offset() as u64;
        span.memory().read(at, &mut chunk).unwrap();
        let elements = u32::from_le_bytes(chunk[16..20].try_into().unwrap()) as usize;
        let other = |codec: Codec, elements: usize| {
            let mut chunk = vec![0; codec.max_bytes(elements).unwrap()];
            let values = vec![1.0_f32; elements];
            encode(codec, 1, View::from(&values[..]), ViewMut::from(&mut chunk[..])).unwrap();
            chunk
        };
        match self {
            Self::Cut => chunk.truncate(span.bytes() - 1),
            Self::Magic => chunk[0] = 0,
            Self::Header => chunk[22] ^= 4,
            Self::Count => chunk = other(Codec::INT8, elements - 1),
            Self::Codec => chunk = other(Codec::INT4, elements),
        }
        span.memory().write(at, &chunk).unwrap();
        span.range(0, chunk.len() as u64).unwrap()
    }
}

/// The chunk to damage next, if any.
struct Tampering {
    damage: Damage,
    on: Arc<AtomicBool>,
}

/// Puts a transport that damages a chunk around another, and returns the switch that has it damage the next.
pub(crate) fn tampering(
    inner: Box<dyn Transport + Send>,
    damage: Damage,
) -> (Box<dyn Transport + Send>, Arc<AtomicBool>) {
    let on = Arc::new(AtomicBool::new(false));
    (Box::new(Tap { inner, hooks: Tampering { damage, on: Arc::clone(&on) } }), on)
}

impl Hooks for Tampering {
    fn payload(&mut self, payload: Span) -> Span {
        if self.on.swap(false, Ordering::Relaxed) { self.damage.done_to(&payload) } else { payload }
    }
}
