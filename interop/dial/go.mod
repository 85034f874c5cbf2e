module devlet.test/interop/dial

go 1.26
