/* SPDX-License-Identifier: MIT */
#ifndef FUZZ_FORMAT_H
#define FUZZ_FORMAT_H
/*
 * The parsers under any bytes. The first byte of an input says what the rest is: 'i', an index;
 * 'c', a coded file; 'z', a zip file; 'p', a pickle; 'm', the manifest of step 7; anything else, a
 * safetensors file from its first byte on, cut or lengthened to a made-up size. What is refused
 * must be refused in words. What is accepted must keep every promise that safetensors.h, coded.h,
 * index.h, zip.h, pickle.h and manifest.h make; breaking one aborts.
 */
#include <stddef.h>
#include <stdint.h>

/* What libFuzzer calls, and the regression driver too. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* How many inputs were accepted so far; a driver whose inputs are all refused tests little. */
extern unsigned long fuzz_accepted;

#endif
