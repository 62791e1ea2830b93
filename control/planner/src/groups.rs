//! Multicast addresses that an operator leaves to communicators.

use core::net::Ipv4Addr;
use std::fmt;
use std::str::FromStr;

/// A range of IPv4's multicast addresses, such as "239.192.0.0/16".
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct Groups {
    first: Ipv4Addr,
    length: u32,
}

/// A text that is no such range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no range of multicast addresses, such as 239.192.0.0/16")]
pub struct GroupsError(String);

impl FromStr for Groups {
    type Err = GroupsError;
    fn from_str(text: &str) -> Result<Self, GroupsError> {
        let read = || {
            let (first, length) = text.split_once('/')?;
            let (first, length): (Ipv4Addr, u32) = (first.parse().ok()?, length.parse().ok()?);
            let range = Self { first, length };
            // No range leaves 224.0.0.0/4.
            let sound = (4..=32).contains(&length) && first.is_multicast();
            (sound && u32::from(first) & range.rest() == 0).then_some(range)
        };
        read().ok_or_else(|| GroupsError(text.chars().take(40).collect()))
    }
}

impl TryFrom<String> for Groups {
    type Error = GroupsError;
    fn try_from(text: String) -> Result<Self, GroupsError> {
        text.parse()
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.length)
    }
}

impl Groups {
    /// The bits of an address that the range leaves open.
    fn rest(self) -> u32 {
        u32::MAX.checked_shr(self.length).unwrap_or(0)
    }

    /// The address for a number drawn at random. Two may have the same.
    pub fn group(self, number: u64) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.first) | (number as u32 & self.rest()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_read_as_it_is_written_and_holds_its_groups() {
        let range: Groups = "239.192.0.0/16".parse().unwrap();
        assert_eq!(range.to_string(), "239.192.0.0/16");
        assert_eq!(range.group(0xffff_ffff_ffff_0102), Ipv4Addr::new(239, 192, 1, 2));
        let one: Groups = "239.1.2.3/32".parse().unwrap();
        assert_eq!(one.group(u64::MAX), Ipv4Addr::new(239, 1, 2, 3));
    }

    #[test]
    fn what_is_no_range_of_multicast_addresses_is_refused() {
        for text in
            ["", "239.0.0.0", "10.0.0.0/8", "239.0.0.1/8", "224.0.0.0/3", "239.0.0.0/33", "x/8", "ff02::1/16"]
        {
            assert!(text.parse::<Groups>().unwrap_err().to_string().contains("no range"), "{text}");
        }
    }
}
