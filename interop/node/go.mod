module devlet.test/interop/node

go 1.26
