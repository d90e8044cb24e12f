//! Each format's output for one sample census.

mod census_table;
mod html;
mod sample;
