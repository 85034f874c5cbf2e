package main

const release = "v1.30.14"

var extra = map[string]func([]string) error{"samples": writeSamples}
