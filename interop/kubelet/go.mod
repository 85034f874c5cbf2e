module devlet.test/interop/kubelet

go 1.26.0

require (
	devlet.test/interop/kubernetes v0.0.0
	devlet.test/interop/node v0.0.0
)

replace (
	devlet.test/interop/kubernetes => ../kubernetes
	devlet.test/interop/node => ../node
)
