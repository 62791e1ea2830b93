//! What a certificate says of its holder.

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Whoever it is, on this machine's loopback: may speak for every host, and as every operator.
    Local,
    /// The holder of a certificate.
    Certified {
        /// Hosts and aggregators that it may speak for.
        hosts: Vec<String>,
        /// Operators that it may be.
        operators: Vec<String>,
    },
}

impl Identity {
    /// What DNS names and URIs of a certificate say. A URI that is no SPIFFE ID, or of another form, says nothing.
    pub fn new<'a>(
        names: impl IntoIterator<Item = &'a str>,
        uris: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let (mut hosts, mut operators): (Vec<String>, Vec<String>) = Default::default();
        for name in names {
            hosts.push(name.to_owned());
            operators.push(name.to_owned());
        }
        for uri in uris {
            let Some(path) = uri.strip_prefix("spiffe://") else { continue };
            match path.rsplit('/').collect::<Vec<_>>().as_slice() {
                [name, "host", _, ..] if !name.is_empty() => hosts.push((*name).to_owned()),
                [name, "operator", _, ..] if !name.is_empty() => operators.push((*name).to_owned()),
                _ => {}
            }
        }
        Self::Certified { hosts, operators }
    }

    /// Whether it may speak for a host or an aggregator.
    pub fn may_be_host(&self, name: &str) -> bool {
        match self {
            Self::Local => true,
            Self::Certified { hosts, .. } => hosts.iter().any(|host| host == name),
        }
    }
}

/// For logs: "anyone on this machine", or its names.
impl std::fmt::Display for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self::Certified { hosts, operators } = self else {
            return f.write_str("anyone on this machine");
        };
        let more = operators.iter().filter(|name| !hosts.contains(name));
        let names: Vec<&str> = hosts.iter().chain(more).map(String::as_str).collect();
        if names.is_empty() { f.write_str("nobody") } else { f.write_str(&names.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_spiffe_ids_say_who_somebody_is() {
        let any = Identity::new(["h0"], []);
        assert!(any.may_be_host("h0") && !any.may_be_host("h1") && !any.may_be_host("H0"));
        let host = Identity::new([], ["spiffe://site.example/harmonaize/host/h1", "https://x/host/h2"]);
        assert_eq!(host, Identity::Certified { hosts: vec!["h1".into()], operators: vec![] });
        let operator = Identity::new([], ["spiffe://site.example/operator/alice"]);
        assert_eq!(operator, Identity::Certified { hosts: vec![], operators: vec!["alice".into()] });
        let nothing = ["spiffe://host/h1", "spiffe://d/host/", "spiffe://d/hosts/h1", "spiffe://", "h1"];
        assert_eq!(Identity::new([], nothing).to_string(), "nobody");
        assert!(Identity::Local.may_be_host("any"));
    }
}
