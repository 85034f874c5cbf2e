package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// manifests has the API server check packaging/kubernetes. drive runs in the root of the repository.
var manifests = []scenario{{name: "manifests", run: func(t *T) {
	check := exec.Command("packaging/kubernetes/check")
	check.Env = append(os.Environ(), "KUBECONFIG="+t.AdminConfig, "KUBECTL="+filepath.Join(t.Bin, "kubectl"))
	out, err := check.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	t.Check("the API server accepts them", err)
}}}
