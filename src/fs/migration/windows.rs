//! The windows of a session that moves.

use std::collections::HashMap;
use std::io;

use super::format::WindowState;
use super::invalid;
use crate::fs::PassthroughFs;
use crate::fuse::abi::InitFlags;
use crate::window::OpenFile;

/// What the guest of a session with a window was told at INIT.
const WINDOWS: InitFlags = InitFlags::PASSTHROUGH_SHM.union(InitFlags::HAS_INODE_DAX);

impl PassthroughFs {
    /// What another daemon must know of the windows, if the guest has one.
    ///
    /// # Errors
    /// If the guest has files mapped that it cannot let go of any more.
    pub(super) fn save_window(&self) -> io::Result<Option<WindowState>> {
        let Some(window) = self.window.as_ref().filter(|_| self.has(WINDOWS)) else { return Ok(None) };
        if window.live() > 0 {
            return Err(io::Error::other(
                "the guest has mapped files in its DAX window, and nobody can tell it to let go",
            ));
        }
        let table = self.passing().map(|pass| pass.moved()).transpose().map_err(|mapped| {
            io::Error::other(format!(
                "the guest has not let go of {mapped} files of its passthrough window: it does so while it runs, once \
                 the frontend has the changes of its memory logged"
            ))
        })?;
        Ok(Some(WindowState { sizes: window.sizes(), table }))
    }

    /// Goes on with the windows of another daemon, whose files this one has by now.
    pub(super) fn load_window(&self, flags: InitFlags, state: Option<&WindowState>) -> io::Result<()> {
        let Some(state) = state else {
            return match flags.intersects(WINDOWS) {
                true => Err(invalid("the state is damaged: there is no window in it")),
                false => Ok(()),
            };
        };
        let window = self.window.as_ref().filter(|_| flags.intersects(WINDOWS));
        let window = window.ok_or_else(|| invalid("the state is damaged: a window that the guest does not have"))?;
        if state.sizes != window.sizes() {
            return Err(invalid(format!(
                "the guest's windows have {:?} bytes, and here {:?}: give this daemon the --dax-window and \
                 --passthrough-window of the source",
                state.sizes,
                window.sizes()
            )));
        }
        let table = state.table.as_ref().filter(|_| flags.contains(InitFlags::PASSTHROUGH_SHM));
        if table.is_some() != flags.contains(InitFlags::PASSTHROUGH_SHM) {
            return Err(invalid("the state is damaged: there is no table in it"));
        }
        match (table, window.passthrough()) {
            (Some(table), Some(pass)) => pass.resume(table, self.open_files()).map_err(invalid),
            (Some(_), None) => Err(invalid("the frontend has no shared memory for the guest's window")),
            (None, _) => Ok(()),
        }
    }

    /// The files that the guest has open, and how often.
    fn open_files(&self) -> Vec<OpenFile> {
        let mut opens: HashMap<u64, u32> = HashMap::new();
        self.handles.for_each(|_, handle| {
            // A file that is lost is not counted when it is released, either.
            if let Some(handle) = handle.ok().filter(|handle| handle.listing().is_err()) {
                *opens.entry(handle.node).or_default() += 1;
            }
        });
        let file = |(node, opens)| {
            let source = self.opener(self.inodes.get(node).ok()?);
            Some(OpenFile { node, opens, source })
        };
        opens.into_iter().filter_map(file).collect()
    }
}
