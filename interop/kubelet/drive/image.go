package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
)

// writeImage writes an image with one layer, as `ctr images import` reads it. The files are programs of the host by
// their paths in the image, the links names for other paths.
func writeImage(path, name string, files, links map[string]string, command ...string) error {
	var layer bytes.Buffer
	archive := tar.NewWriter(&layer)
	for _, dir := range []string{"bin/", "dev/", "proc/", "sys/", "tmp/"} {
		if err := archive.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}); err != nil {
			return err
		}
	}
	for to, from := range files {
		content, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if err := addFile(archive, to, 0o755, content); err != nil {
			return err
		}
	}
	for to, target := range links {
		header := &tar.Header{Typeflag: tar.TypeSymlink, Name: to, Linkname: target, Mode: 0o777}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
	}
	if err := archive.Close(); err != nil {
		return err
	}

	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Cmd": command, "Env": []string{"PATH=/bin"}},
		"rootfs": map[string]any{
			"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes()))},
		},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]any{map[string]any{
		"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return err
	}
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	image := tar.NewWriter(out)
	for _, part := range []struct {
		name    string
		content []byte
	}{{"config.json", config}, {"layer.tar", layer.Bytes()}, {"manifest.json", manifest}} {
		if err := addFile(image, part.name, 0o644, part.content); err != nil {
			return err
		}
	}
	return image.Close()
}

func addFile(archive *tar.Writer, name string, mode int64, content []byte) error {
	if err := archive.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := archive.Write(content)
	return err
}
