//! Parses options that are small languages: --xattrmap, --translate-uid, sizes, id ranges, -o modcaps.
#![no_main]

use std::ffi::CString;

use libfuzzer_sys::fuzz_target;
use thruway::cli::fuzzing;
use thruway::fs::idmap::{IdMap, Rule};
use thruway::fs::xattrmap::XattrMap;
use thruway::sandbox::IdRange;
use thruway::sandbox::caps::ModCaps;
use thruway_fuzz::Input;

/// A rule of --xattrmap, as in the manual: type, scope, the guest's prefix, the host's prefix.
type XattrRule<'a> = (&'a str, &'a str, &'a [u8], &'a [u8]);

fn xattr_rules(text: &str) -> Option<Vec<XattrRule<'_>>> {
    let mut rules = Vec::new();
    let mut rest = text.trim();
    while let Some(separator) = rest.chars().next() {
        let mut parts = rest[separator.len_utf8()..].splitn(4, separator);
        let (kind, second, third) = (parts.next()?, parts.next()?, parts.next()?);
        let name = |name: &str| name.len() < 256 && !name.contains('\0');
        let last = parts.next()?;
        if kind == "map" {
            // The rest begins after the third separator.
            if !name(second) || !name(third) || !last.trim().is_empty() {
                return None;
            }
            let (key, prepend) = (second.as_bytes(), third.as_bytes());
            rules.push(("prefix", "all", key, prepend));
            match key.is_empty() {
                true => rules.push(("bad", "all", b"", b"")),
                false => rules.extend([("bad", "all", prepend, key), ("ok", "all", b"" as &[u8], b"" as &[u8])]),
            }
            return Some(rules);
        }
        let (fourth, after) = last.split_once(separator)?;
        let known =
            ["prefix", "ok", "bad", "unsupported"].contains(&kind) && ["client", "server", "all"].contains(&second);
        if !known || !name(third) || !name(fourth) {
            return None;
        }
        rules.push((kind, second, third.as_bytes(), fourth.as_bytes()));
        rest = after.trim_start();
    }
    (!rules.is_empty()).then_some(rules)
}

fn xattrmap(text: &str, name: &[u8]) {
    let (map, rules) = (text.parse::<XattrMap>(), xattr_rules(text));
    assert_eq!(map.is_ok(), rules.is_some(), "{map:?}");
    let (Ok(map), Some(rules)) = (map, rules) else { return };
    let Ok(guest) = CString::new(name) else { return };
    let rule = rules.iter().find(|r| r.1 != "server" && name.starts_with(r.2));
    let want = match rule {
        Some(("ok", ..)) => Ok(name.to_vec()),
        Some(("prefix", _, _, host)) if host.len() + name.len() < 256 => Ok([host, name].concat()),
        Some(("prefix", ..)) => Err(libc::ERANGE),
        Some(("unsupported", ..)) => Err(libc::ENOTSUP),
        _ => Err(libc::EPERM),
    };
    assert_eq!(map.to_host(&guest).map(|name| name.to_bytes().to_vec()), want);
    let rule = rules.iter().find(|r| r.1 != "client" && name.starts_with(r.3));
    let want = match rule {
        Some(("ok", ..)) => Some(name),
        Some(("prefix", _, _, host)) if name.len() > host.len() => Some(&name[host.len()..]),
        _ => None,
    };
    assert_eq!(map.to_guest(name), want);
}

/// One direction of a rule of --translate-uid: kind, first id, target, count.
type IdRule = (&'static str, u64, u64, u64);

fn id_rule(text: &str) -> Option<(Option<IdRule>, Option<IdRule>)> {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '-' && c != '_').unwrap_or(text.len());
    let kind = text[..end].to_lowercase();
    let mut numbers = Vec::new();
    if let Some(separator) = text[end..].chars().next() {
        for number in text[end + separator.len_utf8()..].split(separator) {
            numbers.push(u64::from(number.parse::<u32>().ok()?));
        }
    }
    let most = u64::from(u32::MAX);
    // A range may be empty.
    let fits = |first: u64, count: u64| first + count <= most;
    match (kind.as_str(), &numbers[..]) {
        ("forbid-guest", &[from, count]) => fits(from, count).then_some((Some(("forbid", from, 0, count)), None)),
        ("squash-guest", &[from, to, count]) if fits(from, count) && to < most => {
            Some((Some(("squash", from, to, count)), None))
        }
        ("squash-host", &[from, to, count]) if fits(from, count) && to < most => {
            Some((None, Some(("squash", from, to, count))))
        }
        (kind, &[from, to, count]) if fits(from, count) && fits(to, count) => match kind {
            "guest" => Some((Some(("range", from, to, count)), None)),
            "host" => Some((None, Some(("range", from, to, count)))),
            "map" => Some((Some(("range", from, to, count)), Some(("range", to, from, count)))),
            _ => None,
        },
        _ => None,
    }
}

fn overlap(rules: &[IdRule]) -> bool {
    let meet = |a: &IdRule, b: &IdRule| a.1.max(b.1) < (a.1 + a.3).min(b.1 + b.3);
    rules.iter().enumerate().any(|(n, a)| rules[..n].iter().any(|b| meet(a, b)))
}

fn translate(rules: &[IdRule], id: u64) -> Option<u64> {
    match rules.iter().find(|r| (r.1..r.1 + r.3).contains(&id)) {
        None => Some(id),
        Some(("range", from, to, _)) => Some(to + (id - from)),
        Some(("squash", _, to, _)) => Some(*to),
        Some(_) => None,
    }
}

fn idmap(text: &str, id: u32) {
    let (mut rules, mut to_host, mut to_guest) = (Vec::new(), Vec::new(), Vec::new());
    for rule in text.split(' ') {
        let (got, want) = (rule.parse::<Rule>(), id_rule(rule));
        assert_eq!(got.is_ok(), want.is_some(), "{got:?}");
        let (Ok(got), Some(want)) = (got, want) else { return };
        rules.push(got);
        to_host.extend(want.0);
        to_guest.extend(want.1);
    }
    let map = IdMap::new(&rules);
    assert_eq!(map.is_err(), overlap(&to_host) || overlap(&to_guest));
    let Ok(map) = map else { return };
    let most = u64::from(u32::MAX);
    for id in [id, 0, u32::MAX - 1, u32::MAX] {
        // The invalid id (-1) is never translated, in either direction.
        let host = translate(&to_host, id.into()).filter(|host| id < u32::MAX && *host < most);
        assert_eq!(map.to_host(id).ok().map(u64::from), host);
        assert_eq!(Some(u64::from(map.to_guest(id))), translate(&to_guest, id.into()));
    }
}

fn sizes(text: &str) {
    let digits = text.trim_end_matches(|c: char| "kKmMgG".contains(c));
    let shift = match text.strip_prefix(digits) {
        Some("") => Some(0),
        Some("k" | "K") => Some(10),
        Some("m" | "M") => Some(20),
        Some("g" | "G") => Some(30),
        _ => None,
    };
    let number = digits.parse::<u64>().ok().zip(shift).map(|(n, shift)| u128::from(n) << shift);
    let want = number.and_then(|n| u64::try_from(n).ok());
    assert_eq!(fuzzing::size(text), want);
    let (size, required) = text.strip_suffix(",required").map_or((text, false), |size| (size, true));
    let want = fuzzing::size(size).filter(|n| n % (2 << 20) == 0);
    assert_eq!(fuzzing::window(text).map(|w| (w.size, w.required)), want.map(|size| (size, required)));
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let what = input.u8();
    match what % 4 {
        0 => {
            let len = usize::from(input.u8());
            let name = input.bytes(len);
            std::str::from_utf8(input.0).map_or((), |text| xattrmap(text, name))
        }
        1 => {
            let id = input.u32();
            std::str::from_utf8(input.0).map_or((), |text| idmap(text, id))
        }
        2 => std::str::from_utf8(input.0).map_or((), sizes),
        _ => {
            let Ok(text) = std::str::from_utf8(input.0) else { return };
            let _ = text.parse::<IdRange>();
            let _ = text.parse::<ModCaps>();
        }
    }
});
