module devlet.test/interop/checkpoints

go 1.26
