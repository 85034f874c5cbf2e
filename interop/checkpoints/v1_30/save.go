package main

import (
	"bytes"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"

	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"

	"devlet.test/interop/checkpoints/frame"
)

// saveClaims stores the list with the code under test, and writes the file and
// the hashed text. A sample that the release cannot read again goes into the
// folder "rejected", with the text that is hashed on reading.
func saveClaims(dir, name string, list state.ClaimInfoStateList) error {
	checkpointer, err := state.NewCheckpointState(frame.Dir, claimsFile)
	if err != nil {
		return err
	}
	if err := checkpointer.Store(list); err != nil {
		return err
	}
	data, err := os.ReadFile(filepath.Join(frame.Dir, claimsFile))
	if err != nil {
		return err
	}
	_, err = checkpointer.GetOrCreate()
	text, _ := hashedClaims(data)
	return save(dir, name, data, text, err)
}

func save(dir, name string, data, text []byte, readErr error) error {
	sum := fnv.New32a()
	sum.Write(text)
	matches := bytes.Contains(data, []byte(fmt.Sprintf(`hecksum":%d}`, sum.Sum32())))
	if matches != (readErr == nil) {
		return fmt.Errorf("%s: sum of the text matches: %v, but the error of reading is %v", name, matches, readErr)
	}
	if readErr != nil {
		dir = filepath.Join(dir, "rejected")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), data, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".hashed.txt"), text, 0o644)
}
