/* SPDX-License-Identifier: MIT */
/*
 * The header of a safetensors file, from bytes to a table. Every way to be wrong has a line in one
 * of the lists below, with a piece of the message that a user would read and the byte of the file
 * that it must name. Bytes are handed over in memory of just their size, so that the address
 * sanitizer sees every step too far.
 */
#include <errno.h>
#include <stdbool.h>
#include "format/dtype.h"
#include "format/safetensors.h"
#include "sys/fault.h"
#include "test.h"

#define NAME "weights.safetensors"
#define ONE "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]"

static struct pen_error err;

static struct safetensors *parse(const char *header, size_t length, uint64_t data, int *rc)
{
	struct safetensors *table, *again;
	char *bytes = malloc(length ? length : 1);

	CHECK(bytes != NULL);
	memcpy(bytes, header, length);
	memset(&err, 0x55, sizeof(err));
	*rc = safetensors_parse(NAME, bytes, length, 8 + length + data, &table, &err);
	CHECK(!*rc == !!table);
	/* Without a place for words it does the same. */
	CHECK_EQ(safetensors_parse(NAME, bytes, length, 8 + length + data, &again, NULL), *rc);
	free(again);
	free(bytes);
	return table;
}

static struct safetensors *good(const char *header, uint64_t data)
{
	int rc;
	struct safetensors *table = parse(header, strlen(header), data, &rc);

	if (rc)
		fprintf(stderr, "%s: %s\n", header, err.message);
	CHECK_EQ(rc, 0);
	CHECK_EQ(table->data, 8 + strlen(header));
	return table;
}

static void is_refused(const char *header, size_t length, int rc, int64_t offset, const char *words)
{
	if (rc != -EBADMSG || !strstr(err.message, words) || err.offset != offset)
		fprintf(stderr, "%.*s\n  gives %d at %lld: %s\n", (int)length, header, rc,
			(long long)err.offset, err.message);
	CHECK_EQ(rc, -EBADMSG);
	CHECK_EQ(err.code, rc);
	CHECK_EQ(err.domain, PEN_DOMAIN_FORMAT);
	CHECK_EQ(err.raw, 0);
	CHECK(strstr(err.message, words) != NULL);
	CHECK_EQ(err.offset, offset);
	CHECK_TEXT(err.object, NAME);
	CHECK_TEXT(err.operation, "read");
	CHECK(err.hint[0]);
}

static void bad_bytes(const char *header, size_t length, uint64_t data, int64_t offset,
		      const char *words)
{
	int rc;

	parse(header, length, data, &rc);
	is_refused(header, length, rc, offset, words);
}

static void bad(const char *header, uint64_t data, int64_t offset, const char *words)
{
	bad_bytes(header, strlen(header), data, offset, words);
}

/* ---------------------------------------------------------------------- before the header -- */

static size_t header_length(uint64_t said, uint64_t file_size, int *rc)
{
	unsigned char first[8];
	size_t length;

	for (int i = 0; i < 8; i++)
		first[i] = (unsigned char)(said >> (8 * i));
	memset(&err, 0x55, sizeof(err));
	*rc = safetensors_header_length(NAME, first, file_size, &length, &err);
	return length;
}

TEST(the_length_of_the_header)
{
	int rc;

	CHECK_EQ(header_length(2, 10, &rc), 2);
	CHECK_EQ(rc, 0);
	CHECK_EQ(header_length(0, 8, &rc), 0);
	CHECK_EQ(rc, 0);
	CHECK_EQ(header_length(0x010203, 1 << 20, &rc), 0x010203);
	CHECK_EQ(rc, 0);
	CHECK_EQ(header_length(100000000, 100000008, &rc), 100000000);
	CHECK_EQ(rc, 0);
}

TEST(a_length_that_cannot_be_is_refused)
{
	int rc;

	for (uint64_t size = 0; size < 8; size++) {
		header_length(2, size, &rc);
		is_refused("", 0, rc, 0, "too few for a safetensors file");
	}
	header_length(3, 10, &rc);
	is_refused("", 0, rc, 10, "has 3 bytes, but the file ends after 2");
	header_length(100000000, 100000007, &rc);
	is_refused("", 0, rc, 100000007, "the file ends after 99999999");
	CHECK(strstr(err.hint, "cut short") != NULL);
	header_length(100000001, 1ull << 40, &rc);
	is_refused("", 0, rc, 0, "100000001 bytes long, more than the 100000000");
	header_length(UINT64_MAX, 1ull << 40, &rc);
	is_refused("", 0, rc, 0, "18446744073709551615 bytes long");
	header_length(UINT64_MAX - 7, UINT64_MAX, &rc);
	is_refused("", 0, rc, 0, "18446744073709551608 bytes long");
}

TEST(other_kinds_of_files_are_recognised)
{
	static const struct {
		const char *first, *hint;
	} others[] = {
		{ "version https://git-lfs.github.com/spec/v1", "git lfs pull" },
		{ "PK\3\4xxxx", "zip" },
		{ "\x80\2xxxxxx", "pickle" },
		{ "GGUFxxxx", "GGUF" },
		{ "\x89HDF\r\n\x1a\n", "HDF5" },
		{ "<!DOCTYPE html>", "web page" },
		{ "{\"metadata\": ", "JSON" },
		{ "anything", "no safetensors file" },
	};

	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
		size_t length;
		int rc = safetensors_header_length(NAME, (const unsigned char *)others[i].first,
						   1 << 20, &length, &err);

		is_refused(others[i].first, 8, rc, 0, "more than the 100000000");
		CHECK(strstr(err.hint, others[i].hint) != NULL);
	}
}

/* ------------------------------------------------------------------------- what is taken -- */

TEST(an_empty_table)
{
	static const char *const headers[] = {
		"{}", "{}      ", "{ \t\r\n}\n", " \n{}", "{\"__metadata__\":{}}",
		"{\"__metadata__\":null}",
	};

	for (size_t i = 0; i < sizeof(headers) / sizeof(headers[0]); i++) {
		struct safetensors *table = good(headers[i], 0);

		CHECK_EQ(table->count, 0);
		CHECK_EQ(table->metadata_count, 0);
		/* Empty metadata is some, null is none. */
		CHECK_EQ(table->metadata != NULL, strstr(headers[i], ":{}") != NULL);
		free(table);
	}
}

TEST(every_dtype)
{
	static const struct {
		const char *name;
		unsigned int bits;
	} known[] = {
		{ "BOOL", 8 }, { "F4", 4 }, { "F6_E2M3", 6 }, { "F6_E3M2", 6 }, { "U8", 8 },
		{ "I8", 8 }, { "F8_E5M2", 8 }, { "F8_E4M3", 8 }, { "F8_E8M0", 8 },
		{ "F8_E4M3FNUZ", 8 }, { "F8_E5M2FNUZ", 8 }, { "I16", 16 }, { "U16", 16 },
		{ "F16", 16 }, { "BF16", 16 }, { "I32", 32 }, { "U32", 32 }, { "F32", 32 },
		{ "C64", 64 }, { "F64", 64 }, { "I64", 64 }, { "U64", 64 },
	};

	CHECK_EQ(sizeof(known) / sizeof(known[0]), PEN_DTYPES);
	for (int i = 0; i < PEN_DTYPES; i++) {
		struct safetensors *table;
		char header[200];
		uint64_t bytes = 3 * 8 * known[i].bits / 8;

		CHECK_TEXT(pen_dtype_name(i), known[i].name);
		CHECK_EQ(pen_dtype_bits(i), known[i].bits);
		CHECK_EQ(dtype_parse(known[i].name, strlen(known[i].name)), i);
		snprintf(header, sizeof(header),
			 "{\"a\":{\"dtype\":\"%s\",\"shape\":[3,8],\"data_offsets\":[0,%llu]}}",
			 known[i].name, (unsigned long long)bytes);
		table = good(header, bytes);
		CHECK_EQ(table->tensors[0].dtype, i);
		CHECK_EQ(table->tensors[0].bytes, bytes);
		free(table);
	}
	CHECK(!pen_dtype_name(-1) && !pen_dtype_name(PEN_DTYPES));
	CHECK(!pen_dtype_bits(-1) && !pen_dtype_bits(PEN_DTYPES));
	CHECK_EQ(dtype_parse("f32", 3), -1);
	CHECK_EQ(dtype_parse("F32\0", 4), -1);
	CHECK_EQ(dtype_parse("F3", 2), -1);
	CHECK_EQ(dtype_parse("", 0), -1);
}

TEST(tensors_in_the_order_of_their_bytes)
{
	const char *header =
		"{\"last\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[7,15]},"
		"\"z\":{\"dtype\":\"F32\",\"shape\":[3,0,5],\"data_offsets\":[3,3]},"
		"\"first\":{\"shape\":[],\"data_offsets\":[0,1],\"dtype\":\"BOOL\"},"
		"\"a\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[3,3]},"
		"\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[3,7]},"
		"\"__metadata__\":{\"format\":\"pt\",\"\":\"empty\",\"b\":\"\"},"
		"\"second\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[1,3]}}  ";
	static const char *const order[] = { "first", "second", "a", "z", "scalar", "last" };
	static const uint64_t offsets[] = { 0, 1, 3, 3, 3, 7 };
	static const uint32_t ranks[] = { 0, 1, 1, 3, 0, 2 };
	struct safetensors *table = good(header, 15);
	uint64_t data = 8 + strlen(header);

	CHECK_EQ(table->count, 6);
	for (size_t i = 0; i < 6; i++) {
		CHECK_TEXT(table->tensors[i].name, order[i]);
		CHECK_EQ(table->tensors[i].offset, data + offsets[i]);
		CHECK_EQ(table->tensors[i].rank, ranks[i]);
	}
	CHECK_EQ(table->tensors[3].shape[0], 3);
	CHECK_EQ(table->tensors[3].shape[1], 0);
	CHECK_EQ(table->tensors[3].shape[2], 5);
	CHECK_EQ(table->metadata_count, 3);
	CHECK_TEXT(table->metadata[0].key, "format");
	CHECK_TEXT(table->metadata[0].value, "pt");
	CHECK_TEXT(table->metadata[1].key, "");
	CHECK_TEXT(table->metadata[1].value, "empty");
	CHECK_TEXT(table->metadata[2].value, "");
	free(table);
}

TEST(names_are_any_text)
{
	struct safetensors *table = good("{\"\\ud83d\\ude00 \\\"\\n\":{" ONE "}}", 1);

	CHECK_TEXT(table->tensors[0].name, "\xf0\x9f\x98\x80 \"\n");
	free(table);
	table = good("{\"\":{" ONE "}}", 1);
	CHECK_TEXT(table->tensors[0].name, "");
	free(table);
	table = good("{\"\xef\xbf\xbf\":{" ONE "}}", 1);
	CHECK_TEXT(table->tensors[0].name, "\xef\xbf\xbf");
	free(table);
}

TEST(fields_that_nobody_knows_are_ignored)
{
	struct safetensors *table = good("{\"a\":{" ONE ",\"x\":{\"y\":[1,null,true,1.5]}}}", 1);

	CHECK_EQ(table->count, 1);
	free(table);
}

TEST(of_the_same_names_the_last_one_counts)
{
	/* The first would be refused by itself: only its form is looked at. */
	struct safetensors *table =
		good("{\"a\":{\"dtype\":\"F32\",\"shape\":[9],\"data_offsets\":[7,3]},"
		     "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]},"
		     "\"\\u0061\":{" ONE "}}", 3);

	CHECK_EQ(table->count, 2);
	CHECK_TEXT(table->tensors[0].name, "a");
	CHECK_EQ(table->tensors[0].dtype, PEN_U8);
	CHECK(table->by_name[0] == &table->tensors[0] && table->by_name[1] == &table->tensors[1]);
	free(table);
	table = good("{\"__metadata__\":{\"k\":\"1\",\"j\":\"2\",\"k\":\"3\"}}", 0);
	CHECK_EQ(table->metadata_count, 2);
	CHECK_TEXT(table->metadata[0].key, "j");
	CHECK_TEXT(table->metadata[1].key, "k");
	CHECK_TEXT(table->metadata[1].value, "3");
	free(table);
	bad("{\"a\":{\"dtype\":\"U9\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{" ONE "}}", 1, 9,
	    "unknown dtype");
}

TEST(texts_may_hold_nul)
{
	struct safetensors *table =
		good("{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
		     "\"a\":{" ONE "},\"__metadata__\":{\"k\\u0000\":\"\\u0000v\",\"k\":\"\"}}", 1);

	CHECK_EQ(table->count, 2);
	CHECK_EQ(table->tensors[0].name_length, 3);
	CHECK(!memcmp(table->tensors[0].name, "a\0b", 4));
	CHECK_TEXT(table->by_name[0]->name, "a");
	CHECK_EQ(table->by_name[0]->name_length, 1);
	CHECK(table->by_name[1] == &table->tensors[0]);
	CHECK_EQ(table->metadata_count, 2);
	CHECK(table->metadata[0].key_length == 2 && !memcmp(table->metadata[0].key, "k\0", 3));
	CHECK(table->metadata[0].value_length == 2 && !memcmp(table->metadata[0].value, "\0v", 3));
	free(table);
	bad("{\"a\\u0000b\":1}", 0, 9, "tensor \"a\xe2\x90\x80" "b\" is not described");
}

/* As serde reads structures and enumerations, and so the reference. */
TEST(fields_may_come_in_a_list)
{
	struct safetensors *table = good("{\"a\":[\"U8\",[2,1],[0,2]],"
					 "\"b\":{\"dtype\":{\"F16\":null},\"shape\":[],"
					 "\"data_offsets\":[2,4]}}", 4);

	CHECK_EQ(table->tensors[0].rank, 2);
	CHECK_EQ(table->tensors[0].bytes, 2);
	CHECK_EQ(table->tensors[1].dtype, PEN_F16);
	free(table);
	bad("{\"a\":[\"U8\",[1]]}", 1, 9, "tensor \"a\" has no \"data_offsets\"");
	bad("{\"a\":[]}", 1, 9, "tensor \"a\" has no \"dtype\"");
	bad("{\"a\":[\"U8\",[1],[0,1],0]}", 1, 9, "more than dtype, shape and data_offsets");
	bad("{\"a\":[{},[1],[0,1]]}", 1, 9, "has no \"dtype\" that is a text");
	bad("{\"a\":[{\"U8\":{}},[1],[0,1]]}", 1, 9, "has no \"dtype\" that is a text");
	bad("{\"a\":[{\"U8\":null,\"U8\":null},[1],[0,1]]}", 1, 9, "has no \"dtype\" that is");
	bad("{\"a\":[{\"U9\":null},[1],[0,1]]}", 1, 9, "unknown dtype \"U9\"");
}

TEST(large_numbers_of_nothing)
{
	struct safetensors *table = good("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,0],"
					 "\"shape\":[0,18446744073709551615,2,9]}}", 0);

	CHECK_EQ(table->tensors[0].bytes, 0);
	CHECK_EQ(table->tensors[0].shape[1], UINT64_MAX);
	free(table);
}

TEST(numbers_that_nobody_reads)
{
	static const char *const taken[] = {
		"-0", "1.5", "1E+5", "1e-999999999999", "0e999999999999", "18446744073709551616",
		"1e308", "17976931348623157e292", "-17976931348623157e292", "0.0001e311",
	};
	static const char *const large[] = {
		"1e309", "-1e309", "17976931348623158e292", "1e999999999999",
		"223456789012345678901e288",
	};
	static const char *const wrong[] = { "-",  "1.",  ".1",   "+1",	 "1e",
					     "1e+", "1.e1", "--1", "-01" };
	char header[200];

	for (size_t i = 0; i < sizeof(taken) / sizeof(taken[0]); i++) {
		snprintf(header, sizeof(header), "{\"a\":{" ONE ",\"x\":%s}}", taken[i]);
		free(good(header, 1));
	}
	for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) {
		snprintf(header, sizeof(header), "{\"a\":{" ONE ",\"x\":%s}}", large[i]);
		bad(header, 1, 64, "number that is too large");
	}
	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		int rc;

		snprintf(header, sizeof(header), "{\"a\":{" ONE ",\"x\":%s}}", wrong[i]);
		parse(header, strlen(header), 1, &rc);
		is_refused(header, strlen(header), rc, err.offset, "not valid JSON");
	}
}

TEST(a_header_as_long_as_may_be)
{
	size_t length = SAFETENSORS_HEADER_MAX;
	char *header = malloc(length);
	struct safetensors *table;

	CHECK(header != NULL);
	memset(header, ' ', length);
	memcpy(header, "{\"a\":{" ONE "}}", strlen("{\"a\":{" ONE "}}"));
	CHECK_EQ(safetensors_parse(NAME, header, length, length + 9, &table, &err), 0);
	CHECK_EQ(table->tensors[0].offset, length + 8);
	free(table);
	free(header);
}

TEST(a_hundred_thousand_tensors)
{
	const unsigned int count = 100000;
	char *header = malloc(100 * count), *at = header;
	struct safetensors *table;

	CHECK(header != NULL);
	*at++ = '{';
	for (unsigned int i = 0; i < count; i++)
		at += sprintf(at, "%s\"tensor.%u\":{\"dtype\":\"U8\",\"shape\":[1],"
			      "\"data_offsets\":[%u,%u]}", i ? "," : "", i * 7919 % count, i,
			      i + 1);
	*at++ = '}';
	CHECK_EQ(safetensors_parse(NAME, header, (size_t)(at - header),
				   8 + (uint64_t)(at - header) + count, &table, &err), 0);
	CHECK_EQ(table->count, count);
	for (unsigned int i = 0; i < count; i++)
		CHECK_EQ(table->tensors[i].offset, table->data + i);
	free(table);
	free(header);
}

/* ------------------------------------------------------------------------ what is refused -- */

TEST(what_is_no_json_is_refused)
{
	static const char deep[] = "{\"a\":{" ONE ",\"x\":";
	char header[2000];
	size_t start = sizeof(deep) - 1;

	bad("", 0, 8, "does not begin with {");
	bad(" ", 0, 9, "does not begin with {");
	bad(" []", 0, 9, "does not begin with {");
	bad("\xef\xbb\xbf{}", 0, 8, "does not begin with {");
	bad("{", 0, 9, "ends in the middle");
	bad("{\"a\"", 0, 12, "ends in the middle");
	bad("{\"a\":", 0, 13, "ends in the middle");
	bad("{\"a", 0, 11, "ends in the middle");
	bad("{}x", 0, 10, "not valid JSON: the end should be where 'x' is");
	bad("{}{}", 0, 10, "not valid JSON: the end should be where '{' is");
	bad("{\"a\":{" ONE "},}", 1, 61, "not valid JSON: a text in quotes should be where '}' is");
	bad("{/**/}", 0, 9, "not valid JSON: a text in quotes");
	bad("{}\f", 0, 10, "not valid JSON: the end should be where the byte 0x0c is");
	bad("{'a':1}", 0, 9, "not valid JSON");
	bad("{\"a\" 1}", 0, 13, "not valid JSON: a : should be where '1' is");
	bad("{\"a\":}", 0, 13, "not valid JSON: a value should be where '}' is");
	bad("{\"a\":{" ONE "]}", 1, 59, "not valid JSON: a , or } should be where ']' is");
	bad("{\"a\1\":{" ONE "}}", 1, 11, "not valid JSON: a control character is in a text");
	bad("{\"a\\x\":{" ONE "}}", 1, 11, "not valid JSON: an escape in a text");
	bad("{\"a\":{\"dtype\":\"U8\",\"shape\":[01],\"data_offsets\":[0,1]}}", 1, 36,
	    "not valid JSON: a number begins with 0");
	bad("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,],\"data_offsets\":[0,1]}}", 1, 38,
	    "not valid JSON: a value should be where ']' is");
	bad("{\"a\":{" ONE ",\"x\":1e999}}", 1, 64, "number that is too large");
	bad("{\"a\":{" ONE ",\"x\":tru}}", 1, 67, "not valid JSON: true, false or null");
	bad_bytes("{}\0\0", 4, 0, 10, "not valid JSON");
	bad_bytes("{\0}", 3, 0, 9, "not valid JSON");
	/* What a reader of C strings would take for the end of the number or the word. */
	bad_bytes("{\"a\":{" ONE ",\"x\":1\0}}", sizeof("{\"a\":{" ONE ",\"x\":1\0}}") - 1, 1, 65,
		  "not valid JSON: a , or } should be where the byte 0x00 is");
	bad_bytes("{\"a\":{" ONE ",\"x\":true\0}}", sizeof("{\"a\":{" ONE ",\"x\":true\0}}") - 1, 1,
		  68, "not valid JSON: a , or } should be where the byte 0x00 is");
	/* As deep as the reference allows, and one deeper. */
	memcpy(header, deep, start);
	memset(header + start, '[', 125);
	memset(header + start + 125, ']', 125);
	memcpy(header + start + 250, "}}", 3);
	free(good(header, 1));
	memset(header + start, '[', 126);
	memset(header + start + 126, ']', 126);
	memcpy(header + start + 252, "}}", 3);
	bad(header, 1, (int64_t)(8 + start + 125), "nested more than 127 deep");
	/* Brackets in a text are no brackets. */
	memset(header + start, '[', 300);
	header[start] = header[start + 299] = '"';
	header[start + 1] = '\\';
	header[start + 2] = '"';
	memcpy(header + start + 300, "}}", 3);
	free(good(header, 1));
}

TEST(bad_utf_8_is_refused)
{
	static const char *const names[] = { "\xff", "\x80", "\xc0\x80", "\xed\xa0\x80",
					     "\xf4\x90\x80\x80", "\xe2\x82" };

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		char header[100];
		int rc;

		snprintf(header, sizeof(header), "{\"a%s\":{" ONE "}}", names[i]);
		parse(header, strlen(header), 1, &rc);
		is_refused(header, strlen(header), rc, err.offset, "not valid UTF-8");
		/* Of a sequence that goes wrong, any byte may be named. */
		CHECK(err.offset >= 10 && err.offset <= 16);
	}
	bad("{\"\\ud800\":{" ONE "}}", 1, 10, "not valid JSON: an escape in a text");
	bad("{\"\\udc00\":{" ONE "}}", 1, 10, "not valid JSON: an escape in a text");
	bad("{\"\\ud800\\u0041\":{" ONE "}}", 1, 10, "not valid JSON: an escape in a text");
	bad("{\"\\udc00\\udc00\":{" ONE "}}", 1, 10, "not valid JSON: an escape in a text");
	bad("{\"\\ud800\\ud800\":{" ONE "}}", 1, 10, "not valid JSON: an escape in a text");
}

TEST(fields_that_come_twice_are_refused)
{
	bad("{\"a\":{" ONE ",\"dtype\":\"U8\"}}", 1, 9, "tensor \"a\" has its \"dtype\" twice");
	bad("{\"a\":{" ONE ",\"\\u0073hape\":[1]}}", 1, 9, "has its \"shape\" twice");
	bad("{\"a\":{" ONE ",\"data_offsets\":[0,1]}}", 1, 9, "has its \"data_offsets\" twice");
	bad("{\"__metadata__\":{},\"__metadata__\":{}}", 0, 27, "__metadata__ twice");
	bad("{\"__metadata__\":null,\"__metadata__\":{}}", 0, 29, "__metadata__ twice");
	free(good("{\"a\":{" ONE ",\"x\":1,\"x\":{\"y\":1,\"y\":2}}}", 1));
}

TEST(metadata_must_be_texts)
{
	bad("{\"__metadata__\":[]}", 0, 9, "__metadata__ is not a JSON object");
	bad("{\"__metadata__\":\"x\"}", 0, 9, "__metadata__ is not a JSON object");
	bad("{\"__metadata__\":{\"a\":1}}", 0, 9, "the key \"a\" whose value is not a text");
	bad("{\"__metadata__\":{\"a\":\"\",\"b\":null}}", 0, 9, "the key \"b\"");
	bad("{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 0, 9, "the key \"a\"");
}

TEST(fields_must_be_there_and_of_their_type)
{
	static const struct {
		const char *fields, *words;
	} cases[] = {
		{ "\"shape\":[1],\"data_offsets\":[0,1]", "has no \"dtype\"" },
		{ "\"dtype\":\"U8\",\"data_offsets\":[0,1]", "has no \"shape\"" },
		{ "\"dtype\":\"U8\",\"shape\":[1]", "has no \"data_offsets\"" },
		{ "\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]", "has no \"dtype\"" },
		{ "\"dtype\":{\"U8\":1},\"shape\":[1],\"data_offsets\":[0,1]",
		  "has no \"dtype\"" },
		{ "\"dtype\":\"u8\",\"shape\":[1],\"data_offsets\":[0,1]", "unknown dtype \"u8\"" },
		{ "\"dtype\":\"F8_E4M3FN\",\"shape\":[1],\"data_offsets\":[0,1]",
		  "unknown dtype \"F8_E4M3FN\"" },
		{ "\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]", "has no \"shape\"" },
		{ "\"dtype\":\"U8\",\"shape\":{},\"data_offsets\":[0,1]", "has no \"shape\"" },
		{ "\"dtype\":\"U8\",\"shape\":[1,-1],\"data_offsets\":[0,1]", "number 2 is not" },
		{ "\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]", "number 1 is not" },
		{ "\"dtype\":\"U8\",\"shape\":[-0],\"data_offsets\":[0,0]", "number 1 is not" },
		{ "\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,1]",
		  "number 1 is not" },
		{ "\"dtype\":\"U8\",\"shape\":[\"1\"],\"data_offsets\":[0,1]", "number 1 is not" },
		{ "\"dtype\":\"U8\",\"shape\":[null],\"data_offsets\":[0,1]", "number 1 is not" },
		{ "\"dtype\":\"U8\",\"shape\":[[1]],\"data_offsets\":[0,1]", "number 1 is not" },
		{ "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":1", "two numbers" },
		{ "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1]", "two numbers" },
		{ "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]", "two numbers" },
		{ "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1.0]", "whole numbers" },
		{ "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[\"0\",1]", "whole numbers" },
		{ "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]", "whole numbers" },
		{ "\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[true,1]", "whole numbers" },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		char header[200];

		snprintf(header, sizeof(header), "{\"it\":{%s}}", cases[i].fields);
		bad(header, 1, 9, cases[i].words);
		CHECK(strstr(err.message, "tensor \"it\"") != NULL);
	}
	bad("{\"it\":null}", 0, 9, "tensor \"it\" is not described by");
	bad("{\"ok\":{" ONE "},\"it\":1}", 1, 62, "tensor \"it\" is not described by");
}

TEST(sizes_must_match)
{
	static const struct {
		const char *dtype, *shape, *offsets;
		uint64_t data;
		const char *words;
	} cases[] = {
		{ "F32", "1", "0,3", 3, "has 3 bytes, but its shape and dtype F32 need 4" },
		{ "F32", "1", "0,5", 5, "has 5 bytes, but its shape and dtype F32 need 4" },
		{ "F32", "", "0,0", 0, "has 0 bytes, but its shape and dtype F32 need 4" },
		{ "F32", "0", "0,4", 4, "has 4 bytes, but its shape and dtype F32 need 0" },
		{ "F32", "2,3", "0,20", 20, "need 24" },
		{ "F4", "3", "0,2", 2, "3 elements of 4 bits, which do not fill whole bytes" },
		{ "F4", "3", "0,1", 1, "do not fill whole bytes" },
		{ "F6_E2M3", "3", "0,3", 3, "3 elements of 6 bits, which do not fill" },
		{ "F4", "2", "0,2", 2, "need 1" },
		{ "U8", "4294967296,4294967296", "0,0", 0, "more elements than 64 bits" },
		{ "U8", "9223372036854775807,3,0", "0,0", 0, "more elements than 64 bits" },
		{ "F64", "4611686018427387904", "0,0", 0, "more bytes than 64 bits" },
		{ "F4", "9223372036854775807", "0,0", 0, "more bytes than 64 bits" },
		{ "U8", "1", "1,0", 1, "begins at 1, after its end at 0" },
		{ "U8", "1", "18446744073709551615,0", 1, "after its end at 0" },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		char header[200];

		snprintf(header, sizeof(header),
			 "{\"it\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%s]}}",
			 cases[i].dtype, cases[i].shape, cases[i].offsets);
		bad(header, cases[i].data, 9, cases[i].words);
	}
}

/* Two tensors of bytes, the second one's entry at byte 61 of the file. */
static void bad_pair(unsigned int begin, unsigned int end, unsigned int begin2, unsigned int end2,
		     uint64_t data, int64_t offset, const char *words)
{
	char header[200];

	snprintf(header, sizeof(header),
		 "{\"a\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":[%u,%u]},"
		 "\"b\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":[%u,%u]}}",
		 end - begin, begin, end, end2 - begin2, begin2, end2);
	if (offset < 0)
		offset = 8 + (int64_t)strlen(header) - offset - 1;
	bad(header, data, offset, words);
}

TEST(holes_and_overlaps_are_refused)
{
	bad_pair(0, 2, 3, 4, 4, 61, "\"b\" begins at 3 and leaves a hole from 2 on");
	bad_pair(1, 2, 2, 4, 4, 9, "\"a\" begins at 1 and leaves a hole from 0 on");
	bad_pair(0, 2, 1, 3, 3, 61, "\"b\" begins at 1, before the one ahead of it ends at 2");
	bad_pair(0, 2, 0, 2, 2, 61, "\"b\" begins at 0, before");
	bad_pair(0, 4, 1, 1, 4, 61, "\"b\" begins at 1, before");
	bad_pair(2, 4, 0, 1, 4, 9, "\"a\" begins at 2 and leaves a hole from 1 on");
	/* An empty one with no neighbour. */
	bad_pair(0, 1, 2, 2, 2, 61, "\"b\" begins at 2 and leaves a hole from 1 on");
}

TEST(the_tensors_must_end_with_the_file)
{
	/* A negative offset here is that from the end of the header. */
	bad_pair(0, 2, 2, 4, 3, -1 - 3, "its tensors have 4 bytes, but the file ends after 3");
	CHECK(strstr(err.hint, "cut short") != NULL);
	bad_pair(0, 2, 2, 4, 0, -1 - 0, "its tensors have 4 bytes, but the file ends after 0");
	bad_pair(0, 2, 2, 4, 7, -1 - 4, "3 bytes after the last tensor belong to none");
	bad("{}", 1, 10, "1 bytes after the last tensor");
	bad("{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775807],"
	    "\"data_offsets\":[0,9223372036854775807]}}", 4, 101, "the file ends after 4");
}

TEST(names_in_messages_are_as_they_are_and_short)
{
	char header[2000] = "{\"\\u001b[31m", long_name[600];

	strcat(header, "\":1}");
	bad(header, 0, 9, "tensor \"\x1b[31m\" is not");
	memset(long_name, 'n', sizeof(long_name));
	long_name[sizeof(long_name) - 1] = 0;
	snprintf(header, sizeof(header), "{\"%s.end\":1}", long_name);
	bad(header, 0, 9, "nnn.end\" is not described by a JSON object");
	CHECK(strstr(err.message, "\"...nn") != NULL);
}

static int fail_malloc(const char *name)
{
	return strcmp(name, "malloc") ? 0 : ENOMEM;
}

TEST(without_memory_it_says_so)
{
	struct safetensors *table;
	const char *header = "{\"a\":{" ONE "}}";

	sys_fault_hook = fail_malloc;
	CHECK_EQ(safetensors_parse(NAME, header, strlen(header), 9 + strlen(header), &table, &err),
		 -ENOMEM);
	CHECK(!table && err.code == -ENOMEM && err.domain == PEN_DOMAIN_ERRNO);
	CHECK(err.message[0]);
}

TEST_MAIN
