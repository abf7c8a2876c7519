//! What the guest agent and the daemon say to each other (docs/guest-agent.md). The agent is the program of this crate;
//! the daemon uses the library alone.

#![warn(missing_docs)]

pub mod protocol;
