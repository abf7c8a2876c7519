//! Options in the form of the C virtiofsd, `-o a,b=c`: those that virtiofsd 1.14 still accepts.

use std::fmt::Display;
use std::str::FromStr;

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;

use super::Options;
use crate::fs::{CachePolicy, Offer};

/// Applies the `-o` options, which override all others.
///
/// # Errors
/// A message of one line about an unknown option or value.
pub fn apply(options: &mut Options) -> Result<(), String> {
    for list in options.compat_options.clone() {
        for option in list.split(',') {
            match option.split_once('=') {
                Some((name, value)) => set(options, name, value)?,
                None => switch(options, option)?,
            }
        }
    }
    Ok(())
}

fn set(options: &mut Options, name: &str, value: &str) -> Result<(), String> {
    match name {
        "source" => options.shared_dir = Some(value.into()),
        "cache" => {
            // The C virtiofsd's name.
            let value = if value == "none" { "never" } else { value };
            options.fs.cache = CachePolicy::from_str(value, false).map_err(|e| bad(name, e))?;
        }
        "sandbox" => options.sandbox = ValueEnum::from_str(value, false).map_err(|e| bad(name, e))?,
        "loglevel" => options.log_level = level(value)?,
        "modcaps" => options.modcaps = Some(parse(name, value)?),
        "xattrmap" => options.fs.xattrmap = Some(parse(name, value)?),
        _ => return Err(format!("there is no option -o {name}=")),
    }
    let (name, value) = match (name, value) {
        ("source", dir) => ("shared-dir", dir),
        ("loglevel", level) => ("log-level", level),
        ("cache", "none") => ("cache", "never"),
        same => same,
    };
    options.in_force.insert(name.into(), value.into());
    Ok(())
}

fn switch(options: &mut Options, name: &str) -> Result<(), String> {
    let (plain, on) = name.strip_prefix("no_").map_or((name, true), |plain| (plain, false));
    let offer = if on { Offer::Always } else { Offer::Never };
    match plain {
        "xattr" => options.fs.xattr = on,
        "readdirplus" => options.fs.no_readdirplus = !on,
        "writeback" => options.fs.writeback = on,
        "allow_direct_io" => options.fs.allow_direct_io = on,
        "announce_submounts" => options.fs.no_announce_submounts = !on,
        "killpriv_v2" => (options.fs.killpriv_v2, options.fs.no_killpriv_v2) = (on, !on),
        "posix_acl" => options.fs.posix_acl = offer,
        "security_label" => options.fs.security_label = offer,
        "posix_lock" => options.fs.posix_lock = on,
        "flock" => options.fs.flock = on,
        _ => return Err(format!("there is no option -o {name}")),
    }
    let value = match plain {
        "readdirplus" | "announce_submounts" => {
            options.in_force.insert(format!("no-{}", plain.replace('_', "-")), (!on).to_string());
            return Ok(());
        }
        "posix_acl" | "security_label" => if on { "always" } else { "never" }.to_owned(),
        _ => on.to_string(),
    };
    options.in_force.insert(plain.replace('_', "-"), value);
    Ok(())
}

fn level(value: &str) -> Result<LevelFilter, String> {
    match value {
        "debug" => Ok(LevelFilter::DEBUG),
        "info" => Ok(LevelFilter::INFO),
        "warn" => Ok(LevelFilter::WARN),
        "err" => Ok(LevelFilter::ERROR),
        _ => Err(bad("loglevel", "one of debug, info, warn, err")),
    }
}

fn parse<T: FromStr<Err: Display>>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|e| bad(name, e))
}

fn bad(name: &str, reason: impl Display) -> String {
    format!("bad value of -o {name}: {reason}")
}
