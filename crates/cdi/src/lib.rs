//! Container Device Interface: names, annotations, spec files, and edits to OCI runtime specs.
