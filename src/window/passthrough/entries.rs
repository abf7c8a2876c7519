//! All entries, and which nodes have them, behind one lock.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::entry::{Entry, Record, Use};
use super::mtime::DeferredMtime;
use super::table::Table;
use crate::fuse::ops::Answer;
use crate::limits::TABLE_ENTRIES;
use crate::window::frontend::Source;

/// What comes of an open.
pub enum Opened {
    /// It has this entry, or is by messages.
    Decided(Option<u32>),
    /// It waits for the decision of another open.
    Waits,
    /// It is the first: a worker must map the file for this entry, the `life`th of all.
    First { index: u32, life: u64 },
    /// The entry was kept for it. The guest must be allowed to store to it once more.
    Kept { index: u32, life: u64 },
    /// It is by messages. The mapper must take the slot of this entry, which was kept.
    Unwanted(u32),
}

/// Lock rule: the last lock but for that of [`DeferredMtime`] and of the jobs. No system call and no call to the
/// frontend while it is held: who revokes takes it. Who looks at a file holds its [`Look`](super::look::Look) first.
pub struct Entries {
    /// Number of the session.
    pub session: u64,
    pub table: Table,
    /// By node.
    indices: HashMap<u64, u32>,
    used: HashMap<u32, Entry>,
    /// How many opens a node has that is open without passthrough.
    messages: HashMap<u64, u32>,
    free: Vec<u32>,
    /// Counts releases.
    releases: u64,
    /// Counts entries.
    lives: u64,
}

impl Entries {
    pub fn new() -> io::Result<Self> {
        let (table, free) = (Table::new()?, (1..TABLE_ENTRIES).collect());
        let (indices, used, messages) = Default::default();
        Ok(Self { session: 0, table, indices, used, messages, free, releases: 0, lives: 0 })
    }

    /// Counts an open of a node. `source`: the file, if it is worth passing through, for the first open.
    pub fn open(&mut self, node: u64, source: Option<Arc<dyn Source>>) -> Opened {
        let by_messages = self.messages.contains_key(&node);
        let index = self.index(node);
        let Some((index, entry)) = index.and_then(|index| Some((index, self.used.get_mut(&index)?))) else {
            if let Some((source, index)) = source.filter(|_| !by_messages).zip(self.free.last().copied()) {
                self.free.pop();
                return self.open_first(node, index, source);
            }
            *self.messages.entry(node).or_default() += 1;
            return Opened::Decided(None);
        };
        match &mut entry.uses {
            Use::Deciding { opens, .. } => {
                *opens += 1;
                Opened::Waits
            }
            Use::Open { opens } => {
                *opens += 1;
                Opened::Decided(Some(index))
            }
            Use::Kept { .. } if source.is_some() => {
                entry.uses = Use::deciding();
                Opened::Kept { index, life: entry.life() }
            }
            Use::Kept { .. } | Use::Over => {
                self.give_up(index);
                self.messages.insert(node, 1);
                Opened::Unwanted(index)
            }
        }
    }

    fn open_first(&mut self, node: u64, index: u32, source: Arc<dyn Source>) -> Opened {
        self.lives += 1;
        // What the guest said of the entry's last node does not count.
        self.table.forget_use(index);
        self.used.insert(index, Entry::new(self.lives, node, *self.table.record(index), source));
        self.update(index, |_| ());
        self.indices.insert(node, index);
        Opened::First { index, life: self.lives }
    }

    /// A node is open in another daemon's session, by this entry.
    pub fn add_open(&mut self, index: u32, record: Record, opens: u32, source: Arc<dyn Source>) {
        self.lives += 1;
        self.used.insert(index, Entry::resumed(self.lives, record, opens, source));
        self.free.retain(|free| *free != index);
        self.update(index, |_| ());
        self.indices.insert(record.nodeid, index);
    }

    /// A node is open in another daemon's session, without an entry.
    pub fn add_open_by_messages(&mut self, node: u64, opens: u32) {
        self.messages.insert(node, opens);
    }

    /// Whether a node has opens, of any kind.
    pub fn is_open(&self, node: u64) -> bool {
        let entry = self.index(node).and_then(|index| self.get(index));
        self.messages.contains_key(&node) || entry.is_some_and(|entry| entry.uses.opens() > 0)
    }

    /// Counts a release of a node. Returns the entry whose slot the mapper must take.
    pub fn release(&mut self, node: u64) -> Option<u32> {
        self.releases += 1;
        let released = self.releases;
        if let Some(opens) = self.messages.get_mut(&node) {
            *opens -= 1;
            if *opens == 0 {
                self.messages.remove(&node);
            }
            return None;
        }
        let index = self.index(node)?;
        let is_over = self.update(index, |entry| entry.release(released))?;
        is_over.then(|| self.indices.remove(&node))?
    }

    /// Ends the use of an entry that is kept. Whether it was.
    pub fn give_up(&mut self, index: u32) -> bool {
        let Some(entry) = self.used.get_mut(&index).filter(|entry| matches!(entry.uses, Use::Kept { .. })) else {
            return false;
        };
        entry.uses = Use::Over;
        self.indices.remove(&entry.node());
        true
    }

    /// [Gives up](Self::give_up) the kept entry that was released first.
    pub fn evict(&mut self) -> Option<u32> {
        let kept = |(index, entry): (&u32, &Entry)| match entry.uses {
            Use::Kept { released } => Some((released, *index)),
            _ => None,
        };
        let (_, index) = self.used.iter().filter_map(kept).min()?;
        self.give_up(index).then_some(index)
    }

    /// Says whether the opens of the `life`th entry have passthrough. Whether they now have, and who waits for that.
    pub fn decide(&mut self, index: u32, life: u64, passes: bool) -> (bool, Vec<Answer<Option<u32>>>) {
        let Some(entry) = self.used.get_mut(&index).filter(|entry| entry.life() == life) else {
            return (false, Vec::new());
        };
        let Some((opens, waiting)) = entry.decide(passes) else { return (false, Vec::new()) };
        let wanted = passes && opens > 0;
        if !wanted {
            self.indices.remove(&entry.node());
        }
        if !passes && opens > 0 {
            self.messages.insert(entry.node(), opens);
        }
        (wanted, waiting)
    }

    /// The answers of opens that wait for a decision on a node, or what was decided.
    pub fn waiting(&mut self, node: u64) -> Result<&mut Vec<Answer<Option<u32>>>, Option<u32>> {
        let index = self.index(node);
        match index.and_then(|index| self.used.get_mut(&index)).map(|entry| &mut entry.uses) {
            Some(Use::Deciding { waiting, .. }) => Ok(waiting),
            _ => Err(index),
        }
    }

    /// The entry that a node has.
    pub fn index(&self, node: u64) -> Option<u32> {
        self.indices.get(&node).copied()
    }

    pub fn get(&self, index: u32) -> Option<&Entry> {
        self.used.get(&index)
    }

    /// Those that are not free, by index.
    pub fn used(&self) -> impl Iterator<Item = (u32, &Entry)> {
        self.used.iter().map(|(index, entry)| (*index, entry))
    }

    /// Changes an entry, and what the guest sees of it.
    pub fn update<R>(&mut self, index: u32, change: impl FnOnce(&mut Entry) -> R) -> Option<R> {
        let entry = self.used.get_mut(&index)?;
        let done = change(entry);
        self.table.write(index, entry.record());
        Some(done)
    }

    /// Notes which slots the guest has used since the last call.
    pub fn look_for_use(&mut self, now: Instant) {
        let table = &self.table;
        for (index, entry) in &mut self.used {
            if let Some(held) = entry.held_mut() {
                held.idle = if table.used(*index) { None } else { held.idle.or(Some(now)) };
            }
        }
    }

    /// Notes that an entry's file must get the present time, if the guest has stored to it. Nobody sees that the guest
    /// no longer says so before that is noted.
    pub fn note_stores(&self, index: u32, times: &DeferredMtime) {
        // Without a file the slot is gone, and whoever took it away has called this.
        let stored = |entry: &&Entry| entry.stored_to().is_some() && self.table.stored(index);
        let file = self.get(index).filter(stored).and_then(|entry| Some((entry.node(), entry.stored_to()?)));
        file.into_iter().for_each(|(node, file)| times.owe(node, file));
    }

    /// The mapper has taken what was in the slot: the entry is free. It may be the last to have its file.
    pub fn remove(&mut self, index: u32) -> Option<Entry> {
        let node = self.update(index, |entry| {
            entry.close();
            entry.node()
        })?;
        if self.index(node) == Some(index) {
            self.indices.remove(&node);
        }
        self.free.push(index);
        self.used.remove(&index)
    }

    /// Ends the session: the guest has no table any more. The mapper must take all slots. Who waits for a decision.
    pub fn end(&mut self, times: &DeferredMtime) -> Vec<Answer<Option<u32>>> {
        self.session += 1;
        self.indices.clear();
        self.messages.clear();
        self.used.keys().for_each(|index| self.note_stores(*index, times));
        self.table.clear();
        let mut waiting = Vec::new();
        for entry in self.used.values_mut() {
            self.lives += 1;
            waiting.extend(entry.end(self.lives));
        }
        waiting
    }

    #[cfg(test)]
    pub fn keep_free(&mut self, most: usize) {
        self.free.truncate(most);
    }

    #[cfg(any(fuzzing, test))]
    pub fn free(&self) -> usize {
        self.free.len()
    }
}
