package main

import (
	"errors"
	"path/filepath"
)

// manifests has the API server check the manifests of packaging/kubernetes.
var manifests = []scenario{{name: "manifests", run: func(t *T) {
	files, err := filepath.Glob("packaging/kubernetes/*.yaml")
	t.ok(err)
	if len(files) == 0 {
		t.ok(errors.New("there is no packaging/kubernetes/*.yaml: start drive in the root of the repository"))
	}
	for _, file := range files {
		_, err := t.Kubectl("", "apply", "--dry-run=server", "-f", file)
		t.Check(filepath.Base(file)+" is accepted", err)
	}
}}}
