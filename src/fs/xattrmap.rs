//! Translation of extended attribute names between guest and host (`--xattrmap`).
//!
//! The rules are those of virtiofsd's `doc/xattr-mapping.md`. The first rule that matches a name decides. A name that
//! no rule matches is `bad`.

use std::borrow::Cow;
use std::ffi::{CStr, CString};
use std::str::FromStr;

use thiserror::Error;

/// Longest name of an attribute in bytes, without its NUL: XATTR_NAME_MAX of include/uapi/linux/limits.h.
pub const NAME_MAX: usize = 255;

/// What is wrong with the rules.
#[expect(missing_docs, reason = "each variant has its message")]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum XattrMapError {
    #[error("there is no rule: try :map::user.virtiofs.:")]
    NoRules,
    #[error("rule {0} breaks off: it must end with its separator, as in :prefix:all:trusted.:user.virtiofs.:")]
    Incomplete(usize),
    #[error("rule {0} has the type '{1}': use one of prefix, ok, bad, unsupported, map")]
    Type(usize, String),
    #[error("rule {0} has the scope '{1}': use one of client, server, all")]
    Scope(usize, String),
    #[error("rule {0} has a NUL byte or a name of more than 255 bytes")]
    Name(usize),
    #[error("rule {0} is a map rule, but not the last rule: only the last rule may be one")]
    MapNotLast(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Prefix,
    Ok,
    Bad,
    Unsupported,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    action: Action,
    client: bool,
    server: bool,
    /// The rule is for the guest's names that start with this.
    key: Vec<u8>,
    /// The rule is for the host's names that start with this. `prefix` puts it before the guest's name.
    prepend: Vec<u8>,
}

/// The rules of one `--xattrmap`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XattrMap {
    rules: Vec<Rule>,
}

impl XattrMap {
    /// The host's name for the guest's `name` in getxattr, setxattr and removexattr.
    ///
    /// # Errors
    /// EPERM for a `bad` name, ENOTSUP for an `unsupported` one. ERANGE, as from the kernel, if the name becomes longer
    /// than [`NAME_MAX`].
    pub fn to_host<'a>(&self, name: &'a CStr) -> Result<Cow<'a, CStr>, i32> {
        let bytes = name.to_bytes();
        let rule = self.rules.iter().find(|r| r.client && bytes.starts_with(&r.key)).ok_or(libc::EPERM)?;
        match rule.action {
            Action::Ok => Ok(Cow::Borrowed(name)),
            Action::Bad => Err(libc::EPERM),
            Action::Unsupported => Err(libc::ENOTSUP),
            Action::Prefix if rule.prepend.len() + bytes.len() > NAME_MAX => Err(libc::ERANGE),
            Action::Prefix => CString::new([&rule.prepend, bytes].concat()).map(Cow::Owned).map_err(|_| libc::EINVAL),
        }
    }

    /// The guest's name for the host's `name` in listxattr. `None`: the guest does not see it.
    pub fn to_guest<'a>(&self, name: &'a [u8]) -> Option<&'a [u8]> {
        let rule = self.rules.iter().find(|r| r.server && name.starts_with(&r.prepend))?;
        match rule.action {
            Action::Ok => Some(name),
            Action::Prefix => Some(&name[rule.prepend.len()..]).filter(|rest| !rest.is_empty()),
            Action::Bad | Action::Unsupported => None,
        }
    }
}

impl FromStr for XattrMap {
    type Err = XattrMapError;

    fn from_str(text: &str) -> Result<Self, XattrMapError> {
        let mut rules = Vec::new();
        let mut rest = text.trim();
        let mut number = 0;
        while let Some(separator) = rest.chars().next() {
            number += 1;
            let mut fields = Fields { rest: &rest[separator.len_utf8()..], separator, number };
            let kind = fields.next()?;
            if kind == "map" {
                rules.extend(map_rules(fields.name()?, fields.name()?));
                if !fields.rest.trim().is_empty() {
                    return Err(XattrMapError::MapNotLast(number));
                }
            } else {
                rules.push(rule(kind, &mut fields)?);
            }
            rest = fields.rest.trim_start();
        }
        if rules.is_empty() { Err(XattrMapError::NoRules) } else { Ok(Self { rules }) }
    }
}

/// The fields of one rule that are still to be read.
struct Fields<'a> {
    rest: &'a str,
    separator: char,
    number: usize,
}

impl<'a> Fields<'a> {
    fn next(&mut self) -> Result<&'a str, XattrMapError> {
        let (field, rest) = self.rest.split_once(self.separator).ok_or(XattrMapError::Incomplete(self.number))?;
        self.rest = rest;
        Ok(field)
    }

    fn name(&mut self) -> Result<Vec<u8>, XattrMapError> {
        let name = self.next()?.as_bytes();
        if name.len() > NAME_MAX || name.contains(&0) {
            return Err(XattrMapError::Name(self.number));
        }
        Ok(name.to_vec())
    }
}

fn rule(kind: &str, fields: &mut Fields) -> Result<Rule, XattrMapError> {
    let action = match kind {
        "prefix" => Action::Prefix,
        "ok" => Action::Ok,
        "bad" => Action::Bad,
        "unsupported" => Action::Unsupported,
        _ => return Err(XattrMapError::Type(fields.number, kind.into())),
    };
    let (client, server) = match fields.next()? {
        "client" => (true, false),
        "server" => (false, true),
        "all" => (true, true),
        scope => return Err(XattrMapError::Scope(fields.number, scope.into())),
    };
    Ok(Rule { action, client, server, key: fields.name()?, prepend: fields.name()? })
}

/// The rules that `:map:key:prepend:` stands for. They prefix the guest's names that match, refuse it the names that
/// already have the prefix, and hide the host's own names that match. All other names pass, unless every name matches.
fn map_rules(key: Vec<u8>, prepend: Vec<u8>) -> Vec<Rule> {
    let all = |action, key: Vec<u8>, prepend: Vec<u8>| Rule { action, client: true, server: true, key, prepend };
    let prefix = all(Action::Prefix, key.clone(), prepend.clone());
    if key.is_empty() {
        return vec![prefix, all(Action::Bad, Vec::new(), Vec::new())];
    }
    vec![prefix, all(Action::Bad, prepend, key), all(Action::Ok, Vec::new(), Vec::new())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(text: &str) -> XattrMap {
        text.parse().unwrap()
    }

    fn host(map: &XattrMap, name: &str) -> Result<String, i32> {
        let name = CString::new(name).unwrap();
        map.to_host(&name).map(|n| n.to_str().unwrap().to_owned())
    }

    fn guest<'a>(map: &XattrMap, name: &'a str) -> Option<&'a str> {
        map.to_guest(name.as_bytes()).map(|n| std::str::from_utf8(n).unwrap())
    }

    #[test]
    fn single_rules_of_the_documentation() {
        let client = map(":prefix:client:trusted.:user.virtiofs.:");
        assert_eq!(host(&client, "trusted.a"), Ok("user.virtiofs.trusted.a".into()));
        assert_eq!(guest(&client, "user.virtiofs.trusted.a"), None);
        let server = map(":prefix:server::user.virtiofs.:");
        assert_eq!(guest(&server, "user.virtiofs.trusted.a"), Some("trusted.a"));
        assert_eq!(host(&server, "trusted.a"), Err(libc::EPERM));
        let both = map(":prefix:all:trusted.:user.virtiofs.:");
        assert_eq!(host(&both, "trusted.a"), Ok("user.virtiofs.trusted.a".into()));
        assert_eq!(guest(&both, "user.virtiofs.trusted.a"), Some("trusted.a"));
        let user = map(":ok:client:user.::");
        assert_eq!((host(&user, "user.a"), host(&user, "trusted.a")), (Ok("user.a".into()), Err(libc::EPERM)));
        assert_eq!(guest(&map(":ok:server::security.:"), "security.x"), Some("security.x"));
        let all = map(":ok:all:::");
        assert_eq!((host(&all, "any"), guest(&all, "any")), (Ok("any".into()), Some("any")));
        assert_eq!(guest(&map(":bad:server::security.::ok:all:::"), "security.x"), None);
    }

    #[test]
    fn example_1_prefixes_everything() {
        let rules = map(":prefix:all::user.virtiofs.::bad:all:::");
        assert_eq!(rules, map(":map::user.virtiofs.:"));
        assert_eq!(host(&rules, "security.x"), Ok("user.virtiofs.security.x".into()));
        assert_eq!(host(&rules, "user.virtiofs.y"), Ok("user.virtiofs.user.virtiofs.y".into()));
        assert_eq!((guest(&rules, "user.virtiofs.security.x"), guest(&rules, "user.y")), (Some("security.x"), None));
    }

    #[test]
    fn example_2_prefixes_trusted() {
        let long = map("/prefix/all/trusted./user.virtiofs./\n  /bad/server//trusted./
            /bad/client/user.virtiofs.//\n\t/ok/all///\n");
        for rules in [long, map("/map/trusted./user.virtiofs./")] {
            assert_eq!(host(&rules, "trusted.a"), Ok("user.virtiofs.trusted.a".into()));
            assert_eq!(guest(&rules, "user.virtiofs.trusted.a"), Some("trusted.a"));
            assert_eq!((guest(&rules, "trusted.a"), host(&rules, "user.virtiofs.trusted.a")), (None, Err(libc::EPERM)));
            assert_eq!((host(&rules, "user.a"), guest(&rules, "user.a")), (Ok("user.a".into()), Some("user.a")));
        }
    }

    #[test]
    fn example_3_hides_security() {
        let rules = map("/bad/all/security./security./\n /ok/all///");
        assert_eq!((host(&rules, "security.a"), guest(&rules, "security.a")), (Err(libc::EPERM), None));
        assert_eq!((host(&rules, "user.a"), guest(&rules, "user.a")), (Ok("user.a".into()), Some("user.a")));
    }

    #[test]
    fn selinux_example_of_the_manual() {
        let rules = map(":map:security.selinux:trusted.virtiofs.:");
        assert_eq!(host(&rules, "security.selinux"), Ok("trusted.virtiofs.security.selinux".into()));
        assert_eq!((guest(&rules, "security.selinux"), guest(&rules, "security.ima")), (None, Some("security.ima")));
    }

    #[test]
    fn unsupported_is_enotsup_and_hidden() {
        let rules = map(":unsupported:all:system.:system.::ok:all:::");
        assert_eq!((host(&rules, "system.a"), guest(&rules, "system.a")), (Err(libc::ENOTSUP), None));
    }

    #[test]
    fn separators_may_differ_from_rule_to_rule_and_be_wide() {
        let rules = map(" :bad:all:a.:a.:  ÷prefix÷all÷b.÷user.÷,ok,all,,,");
        assert_eq!((host(&rules, "a.x"), host(&rules, "b.x")), (Err(libc::EPERM), Ok("user.b.x".into())));
        assert_eq!(host(&rules, "c"), Ok("c".into()));
    }

    #[test]
    fn names_have_a_limit() {
        let rules = map(":map::user.virtiofs.:");
        let longest = "a".repeat(NAME_MAX - "user.virtiofs.".len());
        assert!(host(&rules, &longest).is_ok());
        assert_eq!(host(&rules, &(longest + "a")), Err(libc::ERANGE));
        assert_eq!(guest(&rules, "user.virtiofs."), None);
    }

    #[test]
    fn bad_rules_get_a_reason() {
        let error = |text: &str| text.parse::<XattrMap>().unwrap_err();
        assert_eq!(error(""), XattrMapError::NoRules);
        assert_eq!(error(" \n"), XattrMapError::NoRules);
        assert_eq!(error(":"), XattrMapError::Incomplete(1));
        assert_eq!(error(":prefix:all:trusted.:user.vm."), XattrMapError::Incomplete(1));
        assert_eq!(error(":ok:all::::bad:all::"), XattrMapError::Incomplete(2));
        assert_eq!(error(":zap:all:::"), XattrMapError::Type(1, "zap".into()));
        assert_eq!(error(":ok:guest:::"), XattrMapError::Scope(1, "guest".into()));
        assert_eq!(error(":map::a.::ok:all:::"), XattrMapError::MapNotLast(1));
        assert_eq!(error(&format!(":ok:all:{}::", "k".repeat(256))), XattrMapError::Name(1));
    }
}
