//! What another daemon must know of the table to go on with it, after the guest has let go of all slots.
//!
//! The sender may be hostile. What [`Entries::resume`] takes is bounded by the table.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use postcard::fixint;
use serde::{Deserialize, Serialize};

use super::entries::Entries;
use super::entry::{Entry, EntryState, Place, Record, Use};
use super::table::Seen;
use crate::limits::TABLE_ENTRIES;
use crate::window::frontend::Source;

/// A table without live entries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// How many revocations there were, as the guest reads it.
    pub revocations: u32,
    /// Those of the files that are open.
    pub entries: Vec<MovedEntry>,
}

/// The entry of an open node. It is revoked, and the guest has let go of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedEntry {
    /// Which entry of the table it is.
    #[serde(with = "fixint::le")]
    pub index: u32,
    /// The node.
    #[serde(with = "fixint::le")]
    pub node: u64,
    /// See [`Record::change`].
    #[serde(with = "fixint::le")]
    pub change: u64,
    /// See [`Record::generation`].
    #[serde(with = "fixint::le")]
    pub generation: u32,
    /// See [`Record::lost`].
    #[serde(with = "fixint::le")]
    pub lost: u32,
    /// The sequence number: a guest that was stopped while it read the entry must see that it is another one.
    #[serde(with = "fixint::le")]
    pub seq: u32,
    /// The last generation that the guest has let go of.
    #[serde(with = "fixint::le")]
    pub ack: u32,
}

/// A node that the guest has open.
pub struct OpenFile {
    /// The node.
    pub node: u64,
    /// How often it is open.
    pub opens: u32,
    /// Its file.
    pub source: Arc<dyn Source>,
}

/// Whether a table can be taken over, or what is wrong with it.
pub type Resumed = Result<(), &'static str>;

impl Entries {
    /// What another daemon must know of the table.
    ///
    /// # Errors
    /// How many files the guest has not let go of yet.
    pub fn moved(&self) -> Result<Moved, usize> {
        let mut entries = Vec::new();
        let mut mapped = 0;
        for (index, entry) in self.used() {
            let ack = self.table.acknowledged(index);
            match &entry.uses {
                // The guest has let go of what it does not have open.
                Use::Kept { .. } | Use::Over => {}
                Use::Open { .. } if has_let_go(entry, ack) => {
                    let Record { nodeid: node, change, generation, lost, .. } = *entry.record();
                    let seq = self.table.seq(index);
                    entries.push(MovedEntry { index, node, change, generation, lost, seq, ack });
                }
                Use::Open { .. } | Use::Deciding { .. } => mapped += 1,
            }
        }
        if mapped > 0 {
            return Err(mapped);
        }
        entries.sort_unstable_by_key(|entry| entry.index);
        Ok(Moved { revocations: self.table.revocation_count(), entries })
    }

    /// Goes on with another daemon's table. `files`: all that the guest has open.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn resume(&mut self, moved: &Moved, files: Vec<OpenFile>) -> Resumed {
        if self.used().next().is_some() {
            return Err("slots are in use");
        }
        let mut open: HashMap<u64, OpenFile> = files.into_iter().map(|file| (file.node, file)).collect();
        let mut resumed = Vec::new();
        let mut indices = HashSet::new();
        for entry in &moved.entries {
            if !(1..TABLE_ENTRIES).contains(&entry.index) || !indices.insert(entry.index) {
                return Err("it has an impossible entry of the table");
            }
            // A file that is lost has none. The guest then finds an entry that is not its node's, and sends messages.
            resumed.extend(open.remove(&entry.node).map(|file| (entry, file)));
        }
        self.table.resume(moved.revocations);
        let counted = self.table.revocations();
        for (entry, file) in resumed {
            let MovedEntry { index, node, change, generation, lost, seq, ack } = *entry;
            self.table.resume_entry(index, Seen { seq, ack });
            let state = EntryState::Revoked;
            let record = Record { state, nodeid: node, change, generation, lost, ..Record::default() };
            self.add_open(index, record, file.opens, file.source);
        }
        // They were revoked at the source.
        self.table.set_revocations(counted);
        for (node, OpenFile { opens, .. }) in open {
            self.add_open_by_messages(node, opens);
        }
        Ok(())
    }
}

/// Whether the guest has no way to the slot any more.
fn has_let_go(entry: &Entry, ack: u32) -> bool {
    match entry.state() {
        EntryState::Revoked => !matches!(entry.place, Place::Overdue(_)),
        EntryState::Revoking { .. } => ack == entry.record().generation,
        EntryState::Live { .. } | EntryState::Free => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::passthrough::entry::tests::NoFile;

    fn file(node: u64) -> OpenFile {
        OpenFile { node, opens: 2, source: Arc::new(NoFile) }
    }

    fn entry(index: u32, node: u64) -> MovedEntry {
        MovedEntry { index, node, change: 3, generation: 4, lost: 5, seq: 6, ack: 4 }
    }

    fn resumed(entries: Vec<MovedEntry>) -> Result<Entries, &'static str> {
        let mut all = Entries::new().unwrap();
        let files = [8, 9].map(file).into();
        all.resume(&Moved { revocations: u32::MAX, entries }, files).map(|()| all)
    }

    #[test]
    fn a_table_goes_on() {
        let mut entries = resumed(vec![entry(7, 8), entry(1, 3)]).unwrap();
        let record = Record { nodeid: 8, change: 3, generation: 4, lost: 5, ..Record::default() };
        assert_eq!(entries.get(7).map(Entry::record), Some(&Record { state: EntryState::Revoked, ..record }));
        // The guest sees that the entry was written.
        assert!(entries.table.seq(7) > 6 && entries.table.seq(7) % 2 == 0);
        assert_eq!((entries.index(8), entries.index(3), entries.is_open(3)), (Some(7), None, false));
        assert_eq!(entries.free(), TABLE_ENTRIES as usize - 2);
        // The guest looks at the entry, since the count is another one.
        assert_eq!(entries.table.revocations(), 0);
        let next = Moved { revocations: 0, entries: vec![MovedEntry { seq: 8, ..entry(7, 8) }] };
        assert_eq!(entries.moved(), Ok(next));
        // The other node is open by messages: each open is released once.
        assert_eq!([entries.release(9), entries.release(9)], [None; 2]);
        assert_eq!((entries.is_open(9), entries.release(8), entries.release(8)), (false, None, Some(7)));
        assert_eq!(entries.moved(), Ok(Moved { revocations: 0, entries: vec![] }));
    }

    #[test]
    fn a_hostile_table_is_refused() {
        for impossible in [vec![entry(0, 8)], vec![entry(TABLE_ENTRIES, 8)], vec![entry(5, 8), entry(5, 9)]] {
            assert!(resumed(impossible).is_err());
        }
        // Only one entry of a node counts.
        let entries = resumed(vec![entry(5, 8), entry(6, 8), MovedEntry { seq: 7, ..entry(9, 9) }]).unwrap();
        assert_eq!((entries.index(8), entries.get(6).is_none()), (Some(5), true));
        assert_eq!(entries.table.seq(9) % 2, 0);
        let mut entries = entries;
        assert!(entries.resume(&Moved::default(), Vec::new()).is_err());
    }
}
