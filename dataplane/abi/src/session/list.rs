//! Lists of which no more is taken in than shows that there are too many.

use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;
use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};

/// Reads a list, and leaves out what follows `MOST` entries and one more.
pub(super) fn bounded<'de, const MOST: usize, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_seq(Entries::<MOST, T>(PhantomData))
}

struct Entries<const MOST: usize, T>(PhantomData<T>);

impl<'de, const MOST: usize, T: Deserialize<'de>> Visitor<'de> for Entries<MOST, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Vec<T>, A::Error> {
        let mut taken = Vec::new();
        while let Some(entry) = entries.next_element()? {
            if taken.len() <= MOST {
                taken.push(entry);
            }
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use crate::Collective;
    use crate::session::{
        Budget, Constraints, Expected, Hints, MAX_CODECS, MAX_COMPLETIONS, MAX_SEQUENCE, Request, Target,
        decode, encode,
    };
    use alloc::string::ToString;
    use alloc::vec;
    use core::time::Duration;

    #[test]
    fn of_endless_lists_only_beginnings_are_held() {
        let target = Target { collective: Collective::AllReduce, bytes: 1, p99: Duration::from_secs(1) };
        let negotiate = |targets: usize, codecs: usize| Request::Negotiate {
            id: 1,
            communicator: "c".to_string(),
            propose: Some(Constraints {
                completions: vec![target; targets],
                budget: Some(Budget::Codecs(vec!["int8".to_string(); codecs])),
                ..Constraints::default()
            }),
        };
        let expected = Expected { collective: Collective::AllReduce, bytes: 1, critical: true };
        let hint = |count: usize| Request::Hint {
            id: 1,
            communicator: "c".to_string(),
            hints: Hints { sequence: vec![expected; count], ..Hints::default() },
        };
        let read = |request: &Request| decode::<Request>(&encode(request).unwrap()[4..]).unwrap();
        for request in [negotiate(MAX_COMPLETIONS, MAX_CODECS), hint(MAX_SEQUENCE)] {
            assert_eq!(read(&request), request);
        }
        assert_eq!(read(&negotiate(4000, 4000)), negotiate(MAX_COMPLETIONS + 1, MAX_CODECS + 1));
        assert_eq!(read(&hint(9000)), hint(MAX_SEQUENCE + 1));
    }
}
