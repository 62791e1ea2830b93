//! TCP's congestion control by its name, as the kernel has it.

use core::fmt;
use core::str::FromStr;

/// A TCP congestion control, such as `cubic`, `bbr` or `dctcp`. Its name has 1 to 15 letters, digits, `_` and `-`, as
/// names in the kernel have.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CongestionControl {
    name: [u8; Self::MAX],
    length: u8,
}

impl CongestionControl {
    /// Most bytes of a name: the kernel's TCP_CA_NAME_MAX, without the zero at its end.
    pub const MAX: usize = 15;

    /// Returns its name.
    pub fn as_str(&self) -> &str {
        let name = self.name.get(..usize::from(self.length)).unwrap_or_default();
        core::str::from_utf8(name).unwrap_or_default()
    }
}

/// A text that is not the name of a congestion control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a congestion control has a name of 1 to 15 letters, digits, `_` and `-`, such as \"bbr\"")]
pub struct CongestionControlError;

impl FromStr for CongestionControl {
    type Err = CongestionControlError;

    fn from_str(text: &str) -> Result<Self, CongestionControlError> {
        let usual = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        if text.is_empty() || !text.as_bytes().iter().all(usual) {
            return Err(CongestionControlError);
        }
        let mut name = [0; Self::MAX];
        let room = name.get_mut(..text.len()).ok_or(CongestionControlError)?;
        room.copy_from_slice(text.as_bytes());
        Ok(Self { name, length: text.len() as u8 })
    }
}

impl fmt::Display for CongestionControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for CongestionControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn names_are_those_that_the_kernel_takes() {
        for name in ["bbr", "dctcp-reno", "bpf_cubic", "fifteen-letters"] {
            assert_eq!(name.parse::<CongestionControl>().map(|one| one.to_string()).as_deref(), Ok(name));
        }
        for wrong in ["", "sixteen-letters-", "a b", "bbr\n", "b/r", "bbr\0", "b\u{e4}r"] {
            assert_eq!(wrong.parse::<CongestionControl>(), Err(CongestionControlError), "{wrong:?}");
        }
    }
}
