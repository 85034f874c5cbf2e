//! Access rules: the rights of the user that the kernel reports for a peer.

use crate::resource_name;

/// The access rules. Without any, only root and the node's own user have rights.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Access {
    /// The user that the node runs as.
    pub own_uid: u32,
    /// Further users that may serve resources and drivers.
    pub register: Vec<RegisterRule>,
    /// Further users that may admit and remove pods.
    pub admit: Vec<u32>,
}

/// Users that may serve some resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterRule {
    /// A resource or a driver, or `acme.com/*`.
    pub resource: String,
    /// The users.
    pub uids: Vec<u32>,
    /// `true` if the users may serve the resource beside a plugin of another user.
    pub share: bool,
}

impl Access {
    /// Returns the rules that name this user and this resource.
    fn rules(&self, uid: u32, resource: &str) -> impl Iterator<Item = &RegisterRule> {
        self.register
            .iter()
            .filter(move |rule| resource_name::matches(&rule.resource, resource) && rule.uids.contains(&uid))
    }

    /// Returns `true` for root and the node's own user.
    pub(crate) fn is_trusted(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own_uid
    }

    /// Returns `true` if a plugin of this user may serve the resource.
    pub fn may_register(&self, uid: u32, resource: &str) -> bool {
        self.is_trusted(uid) || self.rules(uid, resource).next().is_some()
    }

    /// Returns `true` if this user may register a resource or driver at a socket of `owner`. Only root may do that for
    /// another user, and only if that user may register it.
    pub fn may_name(&self, uid: u32, owner: u32, resource: &str) -> bool {
        owner == uid || uid == 0 && self.may_register(owner, resource)
    }

    /// Returns `true` if this user may serve the resource beside a plugin of another user. That requires a rule, also
    /// for root.
    pub fn may_share(&self, uid: u32, resource: &str) -> bool {
        self.rules(uid, resource).any(|rule| rule.share)
    }

    /// Returns `true` if this user may register anything, and so may connect.
    pub fn may_connect(&self, uid: u32) -> bool {
        self.is_trusted(uid) || self.register.iter().any(|rule| rule.uids.contains(&uid))
    }

    /// Returns `true` if this user may admit and remove pods.
    pub fn may_admit(&self, uid: u32) -> bool {
        self.is_trusted(uid) || self.admit.contains(&uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        let rule = RegisterRule {
            resource: "acme.com/*".into(),
            uids: vec![1001],
            share: false,
        };
        let sharing = RegisterRule {
            resource: "acme.com/nic".into(),
            uids: vec![0, 1001],
            share: true,
        };
        Access {
            own_uid: 500,
            register: vec![rule, sharing],
            admit: vec![1002],
        }
    }

    #[test]
    fn root_and_the_nodes_own_user_have_all_rights() {
        for uid in [0, 500] {
            assert!(access().may_register(uid, "other.org/nic"));
            assert!(access().may_admit(uid));
            assert!(access().may_connect(uid));
        }
    }

    #[test]
    fn other_users_have_only_the_rights_of_a_rule() {
        assert!(access().may_register(1001, "acme.com/gpu"));
        assert!(!access().may_register(1001, "other.org/nic"));
        assert!(!access().may_admit(1001));
        assert!(access().may_admit(1002));
        assert!(!access().may_register(1002, "acme.com/gpu"));
        assert!(access().may_connect(1001));
        assert!(!access().may_connect(1003));
    }

    #[test]
    fn to_serve_beside_another_user_requires_a_rule() {
        for uid in [0, 500, 1001] {
            assert!(!access().may_share(uid, "acme.com/gpu"), "{uid}");
        }
        assert!(access().may_share(0, "acme.com/nic") && access().may_share(1001, "acme.com/nic"));
        assert!(!access().may_share(500, "acme.com/nic"));
    }
}
