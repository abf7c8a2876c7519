//! For tests that put a daemon into a control group of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::geteuid;

/// A new control group below the test's own. It is removed when it is dropped; nobody may be in it then.
pub struct Group(pub PathBuf);

impl Group {
    /// A group that has `file`, which comes with a controller, of whichever version. `None` if there can be none.
    pub fn new(file: &str) -> Option<Self> {
        if !geteuid().is_root() {
            return None;
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounts = mounts.lines().filter(|line| line.contains(" - cgroup"));
        let name = format!("thruway-test-{}-{:?}", std::process::id(), std::thread::current().id());
        mounts.filter_map(|line| line.split(' ').nth(4)).find_map(|top| {
            let group = Self(Path::new(top).join(&name));
            fs::create_dir(&group.0).ok()?;
            group.0.join(file).exists().then_some(group)
        })
    }

    pub fn set(&self, file: &str, value: impl ToString) {
        fs::write(self.0.join(file), value.to_string()).unwrap();
    }

    // Not all test programs use it.
    #[allow(dead_code)]
    pub fn get(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap().trim().to_owned()
    }

    /// A command that runs another one in the group.
    // Not all test programs use it.
    #[allow(dead_code)]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.0).arg(program);
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}
