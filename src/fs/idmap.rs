//! Translation of user or group ids between guest and host (`--translate-uid`, `--translate-gid`).

use std::str::FromStr;

use rustix::io::Errno;
use thiserror::Error;

/// No user and no group has this id: chown(2) and setresuid(2) take it to mean "leave the id as it is". No range may
/// contain it.
pub const NO_ID: u32 = u32::MAX;

/// Why the guest may not act as an id, or give a file to it.
#[expect(missing_docs, reason = "each variant has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadId {
    #[error("the guest may not use id {0}")]
    Forbidden(u32),
    #[error("{NO_ID} is not an id")]
    None,
}

impl BadId {
    /// The error that the guest gets.
    pub fn errno(self) -> Errno {
        match self {
            Self::Forbidden(_) => Errno::PERM,
            Self::None => Errno::INVAL,
        }
    }
}

/// What is wrong with a translation rule.
#[expect(missing_docs, reason = "each variant has its message")]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum IdMapError {
    #[error("unknown kind '{0}': use one of guest, host, squash-guest, squash-host, forbid-guest, map")]
    Kind(String),
    #[error("'{kind}' takes {expected} numbers, for example {example}")]
    Fields { kind: String, expected: usize, example: &'static str },
    #[error("'{0}' is not an id or a count: use a number from 0 to 4294967295")]
    Number(String),
    #[error("the range from {0} ends beyond 4294967294, the highest id")]
    Overflow(u32),
    #[error("two rules translate {side} id {id}: their ranges may not overlap")]
    Overlap { side: &'static str, id: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Range(u32),
    Squash(u32),
    Forbidden,
}

/// The ids `first..end`, and what they become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first: u32,
    end: u32,
    target: Target,
}

/// One value of the option, for example `map:1000:100000:65536`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    to_host: Option<Range>,
    to_guest: Option<Range>,
}

/// All rules of one option. Without rules no id changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdMap {
    /// Sorted by `first`, without overlap.
    to_host: Vec<Range>,
    /// As `to_host`.
    to_guest: Vec<Range>,
}

impl IdMap {
    /// Joins the rules of one option.
    ///
    /// # Errors
    /// [`IdMapError::Overlap`] if two of them translate the same id in the same direction.
    pub fn new(rules: &[Rule]) -> Result<Self, IdMapError> {
        Ok(Self {
            to_host: sorted("guest", rules.iter().filter_map(|r| r.to_host).collect())?,
            to_guest: sorted("host", rules.iter().filter_map(|r| r.to_guest).collect())?,
        })
    }

    /// Whether no id changes in either direction.
    pub fn is_identity(&self) -> bool {
        self.to_host.is_empty() && self.to_guest.is_empty()
    }

    /// The host's id for the guest's `id`. Ids outside of all ranges do not change.
    ///
    /// # Errors
    /// [`BadId::Forbidden`] if a `forbid-guest` range contains `id`; [`BadId::None`] if either id is [`NO_ID`].
    #[inline]
    pub fn to_host(&self, id: u32) -> Result<u32, BadId> {
        match translate(&self.to_host, id) {
            _ if id == NO_ID => Err(BadId::None),
            Ok(NO_ID) => Err(BadId::None),
            host => host,
        }
    }

    /// The guest's id for the host's `id`. Ids outside of all ranges do not change.
    #[inline]
    pub fn to_guest(&self, id: u32) -> u32 {
        translate(&self.to_guest, id).unwrap_or(id)
    }
}

fn sorted(side: &'static str, mut ranges: Vec<Range>) -> Result<Vec<Range>, IdMapError> {
    // Incus forbids the ids between its ranges, even if there are none (forbid-guest:0:0).
    ranges.retain(|r| r.first < r.end);
    ranges.sort_by_key(|r| r.first);
    match ranges.windows(2).find(|pair| pair[0].end > pair[1].first) {
        Some(pair) => Err(IdMapError::Overlap { side, id: pair[1].first }),
        None => Ok(ranges),
    }
}

fn translate(ranges: &[Range], id: u32) -> Result<u32, BadId> {
    if ranges.is_empty() {
        return Ok(id);
    }
    let after = ranges.partition_point(|r| r.first <= id);
    match ranges[..after].last() {
        Some(r) if id < r.end => match r.target {
            Target::Range(base) => Ok(base + (id - r.first)),
            Target::Squash(target) => Ok(target),
            Target::Forbidden => Err(BadId::Forbidden(id)),
        },
        _ => Ok(id),
    }
}

impl FromStr for Rule {
    type Err = IdMapError;

    /// Reads `kind:from:to:count`. As in virtiofsd, any character that cannot be part of a kind separates the fields.
    fn from_str(text: &str) -> Result<Self, IdMapError> {
        let separator = text.find(|c: char| !c.is_alphanumeric() && c != '-' && c != '_');
        let (kind, fields) = text.split_at(separator.unwrap_or(text.len()));
        let kind = kind.to_lowercase();
        let numbers = numbers(fields)?;
        let (expected, example) = match kind.as_str() {
            "guest" | "host" | "map" => (3, "map:0:100000:65536"),
            "squash-guest" | "squash-host" => (3, "squash-guest:0:1000:65536"),
            "forbid-guest" => (2, "forbid-guest:0:1000"),
            _ => return Err(IdMapError::Kind(kind)),
        };
        if numbers.len() != expected {
            return Err(IdMapError::Fields { kind, expected, example });
        }
        let [from, to, count] = [numbers[0], numbers[1], numbers[expected - 1]];
        let one_way = |target| range(from, target, count).map(Some);
        Ok(match kind.as_str() {
            "guest" => Self { to_host: one_way(Target::Range(to))?, to_guest: None },
            "host" => Self { to_host: None, to_guest: one_way(Target::Range(to))? },
            "squash-guest" => Self { to_host: one_way(Target::Squash(to))?, to_guest: None },
            "squash-host" => Self { to_host: None, to_guest: one_way(Target::Squash(to))? },
            "forbid-guest" => Self { to_host: one_way(Target::Forbidden)?, to_guest: None },
            _ => Self { to_host: one_way(Target::Range(to))?, to_guest: Some(range(to, Target::Range(from), count)?) },
        })
    }
}

/// The numbers in `:1:2:3`.
fn numbers(fields: &str) -> Result<Vec<u32>, IdMapError> {
    let mut chars = fields.chars();
    let Some(separator) = chars.next() else { return Ok(Vec::new()) };
    chars.as_str().split(separator).map(|n| n.parse().map_err(|_| IdMapError::Number(n.into()))).collect()
}

fn range(first: u32, target: Target, count: u32) -> Result<Range, IdMapError> {
    let end = |base: u32| base.checked_add(count).ok_or(IdMapError::Overflow(base));
    match target {
        Target::Range(base) => drop(end(base)?),
        Target::Squash(NO_ID) => return Err(IdMapError::Overflow(NO_ID)),
        Target::Squash(_) | Target::Forbidden => (),
    }
    Ok(Range { first, end: end(first)?, target })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(rules: &[&str]) -> Result<IdMap, IdMapError> {
        IdMap::new(&rules.iter().map(|r| r.parse()).collect::<Result<Vec<Rule>, _>>()?)
    }

    #[test]
    fn an_empty_map_changes_nothing() {
        let map = map(&[]).unwrap();
        assert!(map.is_identity());
        for id in [0, 1000, NO_ID - 1] {
            assert_eq!(map.to_host(id), Ok(id));
            assert_eq!(map.to_guest(id), id);
        }
        assert_eq!(map.to_host(NO_ID), Err(BadId::None));
    }

    #[test]
    fn one_direction_leaves_the_other_alone() {
        let guest = map(&["guest:0:1000:10"]).unwrap();
        assert_eq!((guest.to_host(9), guest.to_host(10), guest.to_guest(1009)), (Ok(1009), Ok(10), 1009));
        let host = map(&["host:1000:0:10"]).unwrap();
        assert_eq!((host.to_guest(1009), host.to_guest(1010), host.to_host(9)), (9, 1010, Ok(9)));
    }

    #[test]
    fn map_goes_both_ways() {
        let map = map(&["map:0:100000:65536"]).unwrap();
        assert_eq!((map.to_host(65535), map.to_guest(165535)), (Ok(165535), 65535));
        assert_eq!((map.to_host(65536), map.to_guest(165536)), (Ok(65536), 165536));
    }

    #[test]
    fn squash_and_forbid() {
        let map =
            map(&["squash-guest:0:1001:1000", "forbid-guest:1000:1", "squash-host:0:65534:500", "host:1001:1000:1"])
                .unwrap();
        assert_eq!((map.to_host(0), map.to_host(999)), (Ok(1001), Ok(1001)));
        assert_eq!((map.to_host(1000), map.to_host(1001)), (Err(BadId::Forbidden(1000)), Ok(1001)));
        assert_eq!((map.to_guest(499), map.to_guest(1001), map.to_guest(500)), (65534, 1000, 500));
    }

    #[test]
    fn the_whole_range_is_all_but_the_invalid_id() {
        let map = map(&["squash-guest:0:100:4294967295"]).unwrap();
        assert_eq!((map.to_host(NO_ID - 1), map.to_host(NO_ID)), (Ok(100), Err(BadId::None)));
        assert_eq!("guest:1:0:4294967295".parse::<Rule>(), Err(IdMapError::Overflow(1)));
        assert_eq!("guest:0:1:4294967295".parse::<Rule>(), Err(IdMapError::Overflow(1)));
        assert_eq!("map:4294967295:0:1".parse::<Rule>(), Err(IdMapError::Overflow(NO_ID)));
        assert_eq!("squash-guest:0:4294967295:1".parse::<Rule>(), Err(IdMapError::Overflow(NO_ID)));
    }

    #[test]
    fn overlapping_sources_are_refused_touching_ones_are_not() {
        assert!(map(&["guest:10:0:10", "guest:0:50:10", "forbid-guest:20:1"]).is_ok());
        // As Incus gives them.
        let incus = map(&["map:0:1000000:65536", "forbid-guest:0:0", "forbid-guest:65536:4294901759"]).unwrap();
        assert_eq!((incus.to_host(65535), incus.to_host(65536)), (Ok(1_065_535), Err(BadId::Forbidden(65536))));
        assert_eq!(incus.to_host(4_294_967_294), Err(BadId::Forbidden(4_294_967_294)));
        assert_eq!(map(&["map:0:1000:10", "forbid-guest:9:5"]), Err(IdMapError::Overlap { side: "guest", id: 9 }));
        assert_eq!(map(&["host:5:0:1", "map:0:5:1"]), Err(IdMapError::Overlap { side: "host", id: 5 }));
    }

    #[test]
    fn other_separators_and_case() {
        assert_eq!("MAP/0/1000/1".parse::<Rule>(), "map:0:1000:1".parse());
    }

    #[test]
    fn bad_rules_get_a_reason() {
        assert_eq!("gast:0:0:1".parse::<Rule>(), Err(IdMapError::Kind("gast".into())));
        assert_eq!("".parse::<Rule>(), Err(IdMapError::Kind("".into())));
        assert!(matches!("guest:0:0".parse::<Rule>(), Err(IdMapError::Fields { expected: 3, .. })));
        assert!(matches!("guest".parse::<Rule>(), Err(IdMapError::Fields { .. })));
        assert!(matches!("forbid-guest:0:0:1".parse::<Rule>(), Err(IdMapError::Fields { expected: 2, .. })));
        for text in ["guest:0:0:4294967296", "guest:-1:0:1", "guest:0::1", "guest:0/0:1"] {
            assert!(matches!(text.parse::<Rule>(), Err(IdMapError::Number(_))), "{text}");
        }
        assert_eq!(map(&["guest:0:0:0", "map:5:5:0", "squash-host:0:0:0"]), Ok(IdMap::default()));
    }
}
