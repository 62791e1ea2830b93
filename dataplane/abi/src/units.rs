//! Units as people write them in configuration: rates, sizes and durations, each a newtype that parses and shows itself.

use alloc::string::String;
use core::fmt;
use core::str::FromStr;

/// A text that is not a quantity of the unit asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {what}; write a number and a unit, such as {example}")]
pub struct UnitError {
    text: String,
    what: &'static str,
    example: &'static str,
}

macro_rules! unit {
    ($(#[$meta:meta])* $name:ident, $what:literal, $example:literal, [$(($unit:literal, $factor:expr)),* $(,)?]) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// Units from the largest to the smallest, with what they stand for.
            const UNITS: &'static [(&'static str, u64)] = &[$(($unit, $factor)),*];
        }

        impl FromStr for $name {
            type Err = UnitError;
            fn from_str(text: &str) -> Result<Self, UnitError> {
                quantity(text, Self::UNITS).map(Self).ok_or_else(|| UnitError {
                    text: text.chars().take(40).collect(),
                    what: $what,
                    example: $example,
                })
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                show(self.0, Self::UNITS, f)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl serde::de::Visitor<'_> for Text {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        write!(f, "a {} in quotes, such as {}", $what, $example)
                    }
                    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(E::custom)
                    }
                }
                match deserializer.is_human_readable() {
                    true => deserializer.deserialize_str(Text),
                    false => u64::deserialize(deserializer).map(Self),
                }
            }
        }

        impl serde::Serialize for $name {
            /// Text where people read it, else the number.
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                match serializer.is_human_readable() {
                    true => serializer.collect_str(self),
                    false => serializer.serialize_u64(self.0),
                }
            }
        }
    };
}

unit! {
    /// A rate in bits a second. Text: "1Gbit/s", "2.5Gbit/s", "800kbit/s"; prefixes are decimal.
    Rate, "rate", "\"1Gbit/s\"", [
        ("Tbit/s", 1_000_000_000_000),
        ("Gbit/s", 1_000_000_000),
        ("Mbit/s", 1_000_000),
        ("kbit/s", 1_000),
        ("bit/s", 1),
    ]
}

unit! {
    /// A number of bytes. Text: "4MiB", "64KiB", "1500B", "1.5GB".
    Bytes, "size", "\"4MiB\"", [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("kB", 1_000),
        ("B", 1),
    ]
}

unit! {
    /// Nanoseconds: a duration, or the time since an instant that the caller chose once. Text: "85us", "1.5ms", "30s", "5min".
    Nanos, "duration", "\"85us\" or \"30s\"", [
        ("h", 3_600_000_000_000),
        ("min", 60_000_000_000),
        ("s", 1_000_000_000),
        ("ms", 1_000_000),
        ("us", 1_000),
        ("µs", 1_000),
        ("ns", 1),
    ]
}

impl Rate {
    /// Bytes that pass in a duration, rounded down.
    pub fn bytes_in(self, duration: Nanos) -> Bytes {
        let bytes = u128::from(self.0) * u128::from(duration.0) / 8 / 1_000_000_000;
        Bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

impl Nanos {
    /// Returns the time this much later, or the last one.
    pub fn after(self, span: core::time::Duration) -> Self {
        Self(self.0.saturating_add(Self::from(span).0))
    }

    /// Returns the time this much earlier, or the first one.
    pub fn before(self, span: core::time::Duration) -> Self {
        Self(self.0.saturating_sub(Self::from(span).0))
    }

    /// Returns the duration since an earlier time; none since a later one.
    pub const fn since(self, earlier: Self) -> core::time::Duration {
        core::time::Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the duration between two times, whichever is later.
    pub const fn abs_diff(self, other: Self) -> core::time::Duration {
        core::time::Duration::from_nanos(self.0.abs_diff(other.0))
    }
}

impl From<core::time::Duration> for Nanos {
    /// Returns the nanoseconds of a duration; the most there are for a longer one.
    fn from(duration: core::time::Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Nanos> for core::time::Duration {
    fn from(nanos: Nanos) -> Self {
        Self::from_nanos(nanos.0)
    }
}

/// Parses a decimal number and one of the units, exactly. Returns `None` where the value is not whole in the smallest
/// unit, or is too large.
fn quantity(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let (number, unit) = text.split_at_checked(split)?;
    let unit = unit.trim_start();
    let factor = units.iter().find(|(name, _)| *name == unit)?.1;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.len() > 18 || fraction.contains('.') {
        return None;
    }
    let whole = whole.parse::<u64>().ok()?.checked_mul(factor)?;
    let scale = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let part = fraction.parse::<u128>().ok()?.checked_mul(u128::from(factor))?;
    if part % scale != 0 {
        return None;
    }
    whole.checked_add(u64::try_from(part / scale).ok()?)
}

/// The largest unit that leaves a whole number.
fn show(value: u64, units: &[(&str, u64)], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let whole = units.iter().find(|(_, factor)| value != 0 && value.is_multiple_of(*factor)).or(units.last());
    match whole {
        Some((name, factor)) => write!(f, "{}{name}", value / factor),
        None => write!(f, "{value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use proptest::prelude::*;

    #[test]
    fn reads_what_people_write() {
        assert_eq!("1Gbit/s".parse(), Ok(Rate(1_000_000_000)));
        assert_eq!("2.5 Gbit/s".parse(), Ok(Rate(2_500_000_000)));
        assert_eq!("85us".parse(), Ok(Nanos(85_000)));
        assert_eq!("1.5ms".parse(), Ok(Nanos(1_500_000)));
        assert_eq!("4MiB".parse(), Ok(Bytes(4 << 20)));
        assert_eq!("0.5KiB".parse(), Ok(Bytes(512)));
        assert_eq!(Rate(1_000_000_000).bytes_in(Nanos(10_000_000)), Bytes(1_250_000));
    }

    #[test]
    fn refuses_malformed_quantities() {
        let bad = [
            "",
            "1",
            "Gbit/s",
            "1.Gbit/s",
            ".5Gbit/s",
            "1..5Gbit/s",
            "-1Gbit/s",
            "1GBit/s",
            "1e3bit/s",
            "0.5bit/s",
        ];
        for text in bad.into_iter().chain(["99999999999999999999bit/s", "18446745Tbit/s"]) {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        let error = "fast".parse::<Rate>().unwrap_err().to_string();
        assert_eq!(error, "`fast` is not a rate; write a number and a unit, such as \"1Gbit/s\"");
    }

    proptest! {
        #[test]
        fn shown_and_read_again(value: u64) {
            prop_assert_eq!(Rate(value).to_string().parse(), Ok(Rate(value)));
            prop_assert_eq!(Bytes(value).to_string().parse(), Ok(Bytes(value)));
            prop_assert_eq!(Nanos(value).to_string().parse(), Ok(Nanos(value)));
        }

        #[test]
        fn any_text_never_panics(text in "[0-9.]{0,24} ?[a-zA-Z/µ]{0,8}") {
            let _ = (text.parse::<Rate>(), text.parse::<Bytes>(), text.parse::<Nanos>());
        }
    }
}
