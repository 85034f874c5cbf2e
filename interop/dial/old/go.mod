module devlet.test/interop/dial/old

go 1.26.0

require (
	devlet.test/interop/dial v0.0.0
	google.golang.org/grpc v1.27.1
	k8s.io/kubelet v0.20.0
)

require (
	github.com/gogo/protobuf v1.3.1 // indirect
	github.com/golang/protobuf v1.4.3 // indirect
	golang.org/x/net v0.0.0-20201110031124-69a78807bb2b // indirect
	golang.org/x/sys v0.0.0-20201112073958-5cba982894dd // indirect
	golang.org/x/text v0.3.4 // indirect
	google.golang.org/genproto v0.0.0-20201110150050-8816d57aaa9a // indirect
	google.golang.org/protobuf v1.25.0 // indirect
)

replace devlet.test/interop/dial => ../
