module devlet.test/interop/events

go 1.26
