//! `libpagefold.so`: folds the pages of the process it is loaded into.
