//! Who may do what: judged by the user that the kernel says is at the other end of a socket.

use crate::resource_name;

/// The rules. Without any, only root and the node's own user may do anything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Access {
    /// The user that the node runs as.
    pub own_uid: u32,
    /// Users that may serve resources and drivers, beyond these two.
    pub register: Vec<RegisterRule>,
    /// Users that may admit and remove pods, beyond these two.
    pub admit: Vec<u32>,
}

/// Users that may serve some resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterRule {
    /// A resource or a driver, or `acme.com/*`.
    pub resource: String,
    /// The users.
    pub uids: Vec<u32>,
    /// Whether they may serve them beside a plugin of another user.
    pub share: bool,
}

impl Access {
    /// The rules that name this user and this resource.
    fn rules(&self, uid: u32, resource: &str) -> impl Iterator<Item = &RegisterRule> {
        self.register
            .iter()
            .filter(move |rule| resource_name::matches(&rule.resource, resource) && rule.uids.contains(&uid))
    }

    /// Whether this is root or the node's own user.
    pub(crate) fn is_trusted(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own_uid
    }

    /// Whether a plugin of this user may serve the resource.
    pub fn may_register(&self, uid: u32, resource: &str) -> bool {
        self.is_trusted(uid) || self.rules(uid, resource).next().is_some()
    }

    /// Whether this user may say that a resource or driver is served at a socket of `owner`: root may for others who could
    /// register it, and nobody else for anybody else.
    pub fn may_name(&self, uid: u32, owner: u32, resource: &str) -> bool {
        owner == uid || uid == 0 && self.may_register(owner, resource)
    }

    /// Whether this user may serve the resource beside a plugin of another user. Nobody may, root included, unless
    /// a rule says so.
    pub fn may_share(&self, uid: u32, resource: &str) -> bool {
        self.rules(uid, resource).any(|rule| rule.share)
    }

    /// Whether this user may have anything to do with registration at all.
    pub fn may_connect(&self, uid: u32) -> bool {
        self.is_trusted(uid) || self.register.iter().any(|rule| rule.uids.contains(&uid))
    }

    /// Whether this user may admit and remove pods.
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
    fn root_and_our_own_user_may_do_everything() {
        for uid in [0, 500] {
            assert!(access().may_register(uid, "other.org/nic"));
            assert!(access().may_admit(uid));
            assert!(access().may_connect(uid));
        }
    }

    #[test]
    fn others_may_do_what_a_rule_says_and_nothing_else() {
        assert!(access().may_register(1001, "acme.com/gpu"));
        assert!(!access().may_register(1001, "other.org/nic"));
        assert!(!access().may_admit(1001));
        assert!(access().may_admit(1002));
        assert!(!access().may_register(1002, "acme.com/gpu"));
        assert!(access().may_connect(1001));
        assert!(!access().may_connect(1003));
    }

    #[test]
    fn to_serve_beside_another_user_takes_a_rule_that_says_so() {
        for uid in [0, 500, 1001] {
            assert!(!access().may_share(uid, "acme.com/gpu"), "{uid}");
        }
        assert!(access().may_share(0, "acme.com/nic") && access().may_share(1001, "acme.com/nic"));
        assert!(!access().may_share(500, "acme.com/nic"));
    }
}
