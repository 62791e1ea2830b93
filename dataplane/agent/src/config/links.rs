//! The part of the configuration that says how links to other agents are protected.

use harmonaize_transport::tcp::LinkProtection;
use serde::Deserialize;

/// What is left out is as usual.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct FileLinks {
    protection: FileProtection,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FileProtection {
    None,
    #[default]
    Authenticated,
    Encrypted,
}

impl FileLinks {
    /// What is asked for.
    pub(super) fn protection(&self) -> LinkProtection {
        match self.protection {
            FileProtection::None => LinkProtection::None,
            FileProtection::Authenticated => LinkProtection::Authenticated,
            FileProtection::Encrypted => LinkProtection::Encrypted,
        }
    }
}
