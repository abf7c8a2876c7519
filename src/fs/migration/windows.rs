//! The windows of a session that moves.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use rustix::io::Errno;

use super::format::{FileState, RangeState, WindowState};
use super::invalid;
use crate::fs::inode::Inode;
use crate::fs::{MigrationOnError, PassthroughFs};
use crate::fuse::abi::InitFlags;
use crate::window::{DaxMapping, OpenFile, RANGE, ResumedRange, Window};

/// What the guest of a session with a window was told at INIT. With dax=always, it does not ask for HAS_INODE_DAX.
const WINDOWS: InitFlags = InitFlags::PASSTHROUGH_SHM.union(InitFlags::HAS_INODE_DAX).union(InitFlags::MAP_ALIGNMENT);

fn sizes(window: &Window) -> [u64; 3] {
    let mut sizes = [0; 3];
    sizes.iter_mut().zip(window.sizes()).for_each(|(size, is)| *size = is);
    sizes
}

impl PassthroughFs {
    /// What another daemon must know of the windows, if the guest has one.
    ///
    /// # Errors
    /// If the guest has files mapped that it cannot let go of any more.
    pub(super) fn save_window(&self) -> io::Result<Option<WindowState>> {
        let Some(window) = self.window.as_ref().filter(|_| self.has(WINDOWS)) else { return Ok(None) };
        let table = self.passing().map(|pass| pass.moved()).transpose().map_err(|mapped| {
            io::Error::other(format!(
                "the guest has not let go of {mapped} files of its passthrough window: it does so while it runs, once \
                 the frontend has the changes of its memory logged"
            ))
        })?;
        if window.dax_size() == 0 {
            return Ok(Some(WindowState { sizes: sizes(window), table, ranges: Vec::new(), files: Vec::new() }));
        }
        // What the guest has stored in copies. The target knows the files themselves.
        window.sync_all().map_err(|e| io::Error::other(format!("what the guest has stored cannot be written: {e}")))?;
        let range = |mapping: DaxMapping| {
            let DaxMapping { at, node, from, stored, .. } = mapping;
            RangeState { range: (at / RANGE) as u32, node, from, stored }
        };
        let busy =
            |_| io::Error::other("the frontend has not answered a request of the window since before it stopped");
        // What is left of files that the guest has forgotten, nobody touches.
        let is_known = |range: &RangeState| self.inodes.get(range.node).is_ok_and(|inode| inode.nlookup() > 0);
        let ranges: Vec<_> = window.mapped().map_err(busy)?.into_iter().map(range).filter(is_known).collect();
        Ok(Some(WindowState { sizes: sizes(window), table, ranges, files: self.told() }))
    }

    /// What the guest was told of the files that it knows.
    fn told(&self) -> Vec<FileState> {
        let told = |inode: Arc<Inode>| {
            let (node, size, granted) = (inode.id, inode.told_size(), self.grants.has(inode.id));
            (size > 0 && inode.format() == libc::S_IFREG).then_some(FileState { node, size, granted })
        };
        self.inodes.all().into_iter().filter_map(told).collect()
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
        if state.sizes != sizes(window) {
            return Err(invalid(format!(
                "the guest's windows have {:?} bytes, and here {:?}: give this daemon the --dax-window and \
                 --passthrough-window of the source",
                state.sizes,
                sizes(window)
            )));
        }
        let table = state.table.as_ref().filter(|_| flags.contains(InitFlags::PASSTHROUGH_SHM));
        if table.is_some() != flags.contains(InitFlags::PASSTHROUGH_SHM) {
            return Err(invalid("the state is damaged: there is no table in it"));
        }
        match (table, window.passthrough()) {
            (Some(table), Some(pass)) => pass.resume(table, self.open_files()).map_err(invalid)?,
            (Some(_), None) => return Err(invalid("the frontend has no shared memory for the guest's window")),
            (None, _) => {}
        }
        self.load_ranges(window, state)
    }

    /// Maps what the guest believes to be mapped in its DAX window.
    fn load_ranges(&self, window: &Window, state: &WindowState) -> io::Result<()> {
        for FileState { node, size, granted } in &state.files {
            // It may be lost, or forgotten.
            let Ok(inode) = self.inodes.get(*node) else { continue };
            // Until the guest hears of another size, the end of the file may lie within a mapping.
            inode.tell_size(*size, true);
            if *granted {
                self.grants.ask(*node, *size, false);
            }
        }
        let range = |state: &RangeState| {
            let RangeState { range, node, from, stored } = *state;
            let inode = self.inodes.get(node).ok().filter(|inode| inode.format() == libc::S_IFREG)?;
            Some(ResumedRange { range: range as usize, node, from, stored, source: self.opener(inode) })
        };
        let ranges: Option<Vec<_>> = state.ranges.iter().map(range).collect();
        let ranges = ranges.ok_or_else(|| invalid("the state is damaged: a mapping of something else than a file"))?;
        let strict = self.config.migration.on_error == MigrationOnError::Abort;
        window.resume(ranges, strict).map_err(|errno| match errno {
            Errno::INVAL => invalid("the state is damaged: an impossible mapping"),
            Errno::TIMEDOUT => io::Error::other("the frontend maps nothing while it waits for the session"),
            errno => io::Error::other(format!("what the guest has mapped cannot be mapped here: {errno}")),
        })
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
