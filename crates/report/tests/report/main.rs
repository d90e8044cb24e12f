//! What each format makes of one sample census.

mod census_table;
mod html;
mod sample;
