//! Which files and directories are watched, by nodeid and by file handle.

use std::collections::HashMap;
use std::hash::Hash;

/// A file, by its handle: what fanotify names it by. The file system is not part of it. Two file systems that are
/// copies of each other have the same handles, so an event of one is taken for an event of both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FileId {
    kind: u8,
    len: u8,
    bytes: [u8; Self::LONGEST],
}

impl FileId {
    /// Bytes of the longest handle: 20 on Btrfs (BTRFS_FID_SIZE_NON_CONNECTABLE), 12 and fewer elsewhere. The rest
    /// fills the struct up to 24 bytes.
    const LONGEST: usize = 22;

    /// `None` if the handle is longer than those of the file systems that can be watched.
    pub fn new(kind: i32, handle: &[u8]) -> Option<Self> {
        let mut bytes = [0; Self::LONGEST];
        bytes.get_mut(..handle.len())?.copy_from_slice(handle);
        Some(Self { kind: u8::try_from(kind).ok()?, len: handle.len() as u8, bytes })
    }
}

/// Which events would show a change of a node's attributes or contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cover {
    /// None.
    Not,
    /// The events of its directory. They show no change by another link of the file.
    ByDirectory,
    /// Its own.
    Itself,
}

struct Node {
    file: FileId,
    marked: bool,
    /// The directory that a file was found in, and the generation of that knowledge. 0: not known.
    dir: u64,
    generation: u32,
    /// Others have changed names in it.
    disturbed: bool,
}

/// The nodes of one file. The guest knows a file by several nodeids if the share has it in several mounts.
enum Nodes {
    One(u64),
    Several(Vec<u64>),
}

impl Nodes {
    fn as_slice(&self) -> &[u64] {
        match self {
            Self::One(node) => std::slice::from_ref(node),
            Self::Several(nodes) => nodes,
        }
    }
}

/// All of a session.
#[derive(Default)]
pub struct Table {
    nodes: HashMap<u64, Node>,
    files: HashMap<FileId, Nodes>,
    marks: usize,
    /// Which directory a file is in is known only if it was learned in this generation. Lost events end one.
    generation: u32,
    /// Some file has had several nodes.
    pub several: bool,
}

impl Table {
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Nodes that are marked.
    pub fn marks(&self) -> usize {
        self.marks
    }

    pub fn has(&self, node: u64) -> bool {
        self.nodes.contains_key(&node)
    }

    pub fn cover(&self, node: u64) -> Cover {
        match self.nodes.get(&node) {
            Some(node) if node.marked => Cover::Itself,
            Some(node) if node.generation == self.generation && self.is_marked(node.dir) => Cover::ByDirectory,
            _ => Cover::Not,
        }
    }

    pub fn is_marked(&self, node: u64) -> bool {
        self.nodes.get(&node).is_some_and(|node| node.marked)
    }

    /// Whether the file was found in this directory last.
    pub fn is_in(&self, node: u64, dir: u64) -> bool {
        self.nodes.get(&node).is_some_and(|node| node.dir == dir && node.generation == self.generation)
    }

    /// The nodes of a file.
    pub fn of(&self, file: Option<FileId>) -> &[u64] {
        file.and_then(|file| self.files.get(&file)).map(Nodes::as_slice).unwrap_or_default()
    }

    /// Enters a node, unless it is there.
    pub fn add(&mut self, node: u64, file: FileId) {
        if self.nodes.contains_key(&node) {
            return;
        }
        self.nodes.insert(node, Node { file, marked: false, dir: 0, generation: 0, disturbed: false });
        match self.files.get_mut(&file) {
            None => drop(self.files.insert(file, Nodes::One(node))),
            Some(nodes) => {
                let mut all = nodes.as_slice().to_vec();
                all.push(node);
                *nodes = Nodes::Several(all);
                self.several = true;
            }
        }
    }

    /// Notes that a file is in a directory; 0: not known.
    pub fn found(&mut self, node: u64, dir: u64) {
        let generation = self.generation;
        if let Some(node) = self.nodes.get_mut(&node) {
            (node.dir, node.generation) = (dir, generation);
        }
    }

    /// Notes that others have changed names in a directory.
    pub fn disturb(&mut self, file: Option<FileId>) {
        for node in self.of(file).to_vec() {
            if let Some(node) = self.nodes.get_mut(&node) {
                node.disturbed = true;
            }
        }
    }

    /// Whether others have changed names in a directory.
    pub fn is_disturbed(&self, node: u64) -> bool {
        self.nodes.get(&node).is_some_and(|node| node.disturbed)
    }

    pub fn set_marked(&mut self, node: u64, marked: bool) {
        if let Some(node) = self.nodes.get_mut(&node).filter(|node| node.marked != marked) {
            node.marked = marked;
            self.marks = if marked { self.marks + 1 } else { self.marks - 1 };
        }
    }

    /// Whether any node of this node's file is marked.
    pub fn shares_mark(&self, node: u64) -> bool {
        let Some(node) = self.nodes.get(&node) else { return false };
        self.of(Some(node.file)).iter().any(|node| self.is_marked(*node))
    }

    pub fn remove(&mut self, node: u64) {
        self.set_marked(node, false);
        let Some(Node { file, .. }) = self.nodes.remove(&node) else { return };
        let left: Vec<u64> = self.of(Some(file)).iter().copied().filter(|other| *other != node).collect();
        match left[..] {
            [] => drop(self.files.remove(&file)),
            [one] => drop(self.files.insert(file, Nodes::One(one))),
            _ => drop(self.files.insert(file, Nodes::Several(left))),
        }
    }

    /// Forgets which directories the files are in.
    pub fn lose(&mut self) {
        self.generation += 1;
    }

    pub fn clear(&mut self) {
        let generation = self.generation + 1;
        *self = Self { generation, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> FileId {
        FileId::new(1, &[n]).unwrap()
    }

    #[test]
    fn a_file_is_covered_by_its_directory_or_by_itself() {
        let mut table = Table::default();
        table.add(1, id(1));
        table.add(7, id(7));
        assert_eq!((table.cover(1), table.cover(7)), (Cover::Not, Cover::Not));
        table.found(7, 1);
        assert_eq!(table.cover(7), Cover::Not);
        table.set_marked(1, true);
        assert_eq!((table.cover(1), table.cover(7)), (Cover::Itself, Cover::ByDirectory));
        table.lose();
        assert_eq!((table.cover(1), table.cover(7)), (Cover::Itself, Cover::Not));
        table.set_marked(7, true);
        assert_eq!((table.cover(7), table.marks()), (Cover::Itself, 2));
        table.remove(1);
        table.remove(7);
        assert_eq!((table.marks(), table.len(), table.of(Some(id(7)))), (0, 0, &[][..]));
    }

    #[test]
    fn a_file_may_have_several_nodes() {
        let mut table = Table::default();
        for node in [3, 4, 5, 4] {
            table.add(node, id(9));
        }
        assert_eq!((table.of(Some(id(9))), table.several), (&[3, 4, 5][..], true));
        table.set_marked(4, true);
        assert!(table.shares_mark(5) && !table.is_marked(5));
        table.remove(4);
        assert!(!table.shares_mark(5));
        table.remove(5);
        assert_eq!(table.of(Some(id(9))), [3]);
        table.clear();
        assert_eq!((table.of(Some(id(9))), table.of(None)), (&[][..], &[][..]));
    }

    #[test]
    fn handles_that_are_too_long_have_no_id() {
        assert!(FileId::new(1, &[0; 22]).is_some() && FileId::new(1, &[0; 23]).is_none());
        assert!(FileId::new(300, &[0]).is_none());
        assert_ne!(FileId::new(1, &[0]), FileId::new(1, &[0, 0]));
    }
}
