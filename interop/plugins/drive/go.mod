module devlet.test/interop/plugins/drive

go 1.26

require devlet.test/interop/node v0.0.0

replace devlet.test/interop/node => ../../node
