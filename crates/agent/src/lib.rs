//! `libpagefold.so`: folds the pages of the process it is loaded into.

mod lock;
mod raw;
mod references;
mod table;
