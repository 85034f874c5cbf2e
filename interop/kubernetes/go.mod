module devlet.test/interop/kubernetes

go 1.26.0

require devlet.test/interop/node v0.0.0

replace devlet.test/interop/node => ../node
