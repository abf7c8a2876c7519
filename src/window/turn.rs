//! The rule that who revokes waits for no file, as types.
//!
//! The mapper's state is behind two locks ([`Dax`](super::dax::Dax), [`Slots`](super::passthrough::Slots)). A thread
//! that holds one has a [`Turn`]. What may wait for a file needs a [`MayWait`], which there is only while the turn's
//! lock is given up, and then there is no way to the state.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

/// The right to wait for a file: for its lock, its file system, the window process or the disk.
pub struct MayWait(());

impl MayWait {
    /// For a thread that has no turn: that of a request.
    pub const fn without_a_turn() -> Self {
        Self(())
    }
}

/// What may wait for a file.
pub struct Slow<T: ?Sized>(Arc<T>);

impl<T: ?Sized> Slow<T> {
    pub const fn new(what: Arc<T>) -> Self {
        Self(what)
    }

    pub fn get(&self, _: &MayWait) -> &T {
        &self.0
    }

    /// Whether both are the same.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T: ?Sized> Clone for Slow<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A state whose lock this thread holds.
pub struct Turn<'a, T>(MutexGuard<'a, T>);

impl<'a, T> Turn<'a, T> {
    pub fn new(state: &'a Mutex<T>) -> Self {
        Self(state.lock())
    }

    /// Gives the lock up while `wait` runs. Other threads change the state meanwhile.
    pub fn unlocked<R>(&mut self, wait: impl FnOnce(&MayWait) -> R) -> R {
        MutexGuard::unlocked_fair(&mut self.0, || wait(&MayWait(())))
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
