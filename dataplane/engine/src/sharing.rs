//! Communicators of a tenant that use one window to aggregators together.

/// How many ways to aggregators of each tenant have something to do. They share a window, so that who has many communicators gets no
/// more of the links from this host than who has one.
#[derive(Debug, Default)]
pub(crate) struct Sharing(Vec<u16>);

impl Sharing {
    /// Makes room for a tenant of this number.
    pub(crate) fn admit(&mut self, tenant: u32) {
        let least = tenant as usize + 1;
        if self.0.len() < least {
            self.0.resize(least, 0);
        }
    }

    /// Counts anew: the tenant of each that has something to do.
    pub(crate) fn count(&mut self, busy: impl Iterator<Item = u32>) {
        self.0.fill(0);
        for tenant in busy {
            if let Some(count) = self.0.get_mut(tenant as usize) {
                *count = count.saturating_add(1);
            }
        }
    }

    /// How many of a tenant have.
    pub(crate) fn of(&self, tenant: u32) -> u16 {
        self.0.get(tenant as usize).copied().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenant_s_are_counted_anew_and_strangers_share_with_nobody() {
        let mut sharing = Sharing::default();
        sharing.admit(2);
        sharing.admit(0);
        sharing.count([2, 0, 2, 7, 2].into_iter());
        assert_eq!([0, 1, 2, 7].map(|tenant| sharing.of(tenant)), [1, 0, 3, 1]);
        sharing.count(std::iter::once(1));
        assert_eq!([0, 1, 2].map(|tenant| sharing.of(tenant)), [0, 1, 0]);
    }
}
