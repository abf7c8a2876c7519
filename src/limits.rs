//! The bounds of what a guest can use up of the host, each with the reason for its number. docs/security.md, "Limits", has
//! the same table with what the guest gets at each bound, the option that changes it and the test that holds it.
