//! The protocols between the processes of a service: its supervisor, one worker for each group of members, and their
//! clients (the crate `service` explains these words).
//!
//! ```text
//!   command line --ask--> supervisor --control--> worker of a group
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `ask` | questions of the command line, and the supervisor's answers |
//! | `control` | orders of the supervisor, and the workers' news |
//! | `change` | settings as people write them |
//! | `enrol` | rules that enrol running processes |
//! | `name` | valid names of groups and members |
//! | `hand` | connections that are handed on to a service |
//! | `template` | questions about templates, and the files that go with them |
//! | `promise` | memory promised to guests before they start |
//! | `place` | the directory of a service |
//! | `shown` | groups in the shapes that programs read |
//! | `history` | questions about figures over time |
//! | `setup` | the supervisor's messages to `pagefold-web` |
//! | `member_words` | states of members in words |
//! | `client` | finds a service and asks it |
#![forbid(unsafe_code)]
// Figures from other processes are added up here, so no sum may overflow.
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

pub mod ask;
pub mod change;
pub mod client;
pub mod control;
pub mod enrol;
pub mod hand;
pub mod history;
pub mod member_words;
pub mod name;
pub mod place;
pub mod promise;
pub mod setup;
pub mod shown;
pub mod template;
