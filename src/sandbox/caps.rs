//! The capabilities that the daemon keeps (`--modcaps`).

use std::collections::HashSet;
use std::str::FromStr;

use caps::{CapSet, Capability, CapsHashSet};

use super::Error;

/// The daemon needs these to act for every user of the guest: files of all users, ownership, modes, device nodes and
/// file capabilities.
const KEPT: [Capability; 8] = [
    Capability::CAP_CHOWN,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_FOWNER,
    Capability::CAP_FSETID,
    Capability::CAP_SETGID,
    Capability::CAP_SETUID,
    Capability::CAP_MKNOD,
    Capability::CAP_SETFCAP,
];

/// Changes to the set of capabilities, for example `+sys_admin:-chown`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModCaps(Vec<(bool, Capability)>);

impl FromStr for ModCaps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(':').map(change).collect::<Result<_, _>>().map(Self)
    }
}

fn change(text: &str) -> Result<(bool, Capability), String> {
    let (add, name) = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(name), _) => (true, name),
        (_, Some(name)) => (false, name),
        _ => return Err(format!("'{text}' must start with + or -, for example +sys_admin:-chown")),
    };
    let name = caps::to_canonical(name);
    let capability = name.parse().map_err(|_| format!("no capability is named {name}: see capabilities(7)"))?;
    Ok((add, capability))
}

impl ModCaps {
    fn apply(&self, set: &mut CapsHashSet) {
        for (add, capability) in &self.0 {
            if *add {
                set.insert(*capability)
            } else {
                set.remove(capability)
            };
        }
    }

    /// Whether the changes add this capability.
    pub fn adds(&self, capability: &Capability) -> bool {
        self.0.iter().rfind(|(_, c)| c == capability).is_some_and(|(add, _)| *add)
    }
}

/// Drops all capabilities that the daemon does not need, for good, and prevents execve(2) from adding any. `handles`:
/// keep CAP_DAC_READ_SEARCH too, which open_by_handle_at(2) needs. Call it before threads start.
///
/// # Errors
/// [`Error::Other`] if `modcaps` adds one that the process does not have.
pub fn limit(modcaps: &ModCaps, handles: bool) -> Result<(), Error> {
    let permitted = caps::read(None, CapSet::Permitted).map_err(|e| Error::Other(e.to_string()))?;
    let mut wanted: CapsHashSet = KEPT.into();
    // Tells whether a file of another user is open for writing (fs/contents.rs). Without it the guest keeps less.
    wanted.insert(Capability::CAP_LEASE);
    if handles {
        wanted.insert(Capability::CAP_DAC_READ_SEARCH);
    }
    modcaps.apply(&mut wanted);
    check_missing(&wanted - &permitted, modcaps, permitted.is_empty())?;
    keep(&(&wanted & &permitted))
}

/// Drops all other capabilities, for good, and prevents execve(2) from adding any.
///
/// # Errors
/// [`Error::Other`] if the process does not have one of them.
pub fn keep(kept: &CapsHashSet) -> Result<(), Error> {
    set(kept).map_err(|e| Error::Other(format!("cannot drop capabilities: {e}")))
}

fn check_missing(missing: CapsHashSet, modcaps: &ModCaps, unprivileged: bool) -> Result<(), Error> {
    if let Some(added) = missing.iter().find(|c| modcaps.adds(c)) {
        return Err(Error::Other(format!(
            "--modcaps cannot add {added}: the daemon was started without it, so start it with more capabilities"
        )));
    }
    let missing: HashSet<_> = missing.into_iter().filter(|c| KEPT.contains(c)).collect();
    if !missing.is_empty() && !unprivileged {
        tracing::warn!("the daemon was started without {missing:?}: guest operations that need them will fail");
    }
    Ok(())
}

fn set(kept: &CapsHashSet) -> Result<(), caps::errors::CapsError> {
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        caps::clear(None, CapSet::Bounding)?;
    }
    caps::clear(None, CapSet::Ambient)?;
    caps::set(None, CapSet::Effective, kept)?;
    caps::set(None, CapSet::Permitted, kept)?;
    caps::clear(None, CapSet::Inheritable)?;
    rustix::thread::set_no_new_privs(true).map_err(|e| caps::errors::CapsError::from(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_apply_in_order() {
        let mut set = KEPT.into();
        let mods: ModCaps = "+sys_admin:-CHOWN:+cap_chown:-chown:-fowner:+fowner".parse().unwrap();
        mods.apply(&mut set);
        assert!(set.contains(&Capability::CAP_SYS_ADMIN) && set.contains(&Capability::CAP_FOWNER));
        assert!(!set.contains(&Capability::CAP_CHOWN));
        assert!(mods.adds(&Capability::CAP_FOWNER) && !mods.adds(&Capability::CAP_CHOWN));
    }

    #[test]
    fn bad_changes_are_refused() {
        for bad in ["", "chown", "+", "+chown:", "+nonsense", ":"] {
            assert!(bad.parse::<ModCaps>().is_err(), "{bad}");
        }
    }
}
