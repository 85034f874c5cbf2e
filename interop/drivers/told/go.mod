module devlet.test/interop/told

go 1.26
