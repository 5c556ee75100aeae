/* SPDX-License-Identifier: MIT */
/*
 * Pickles as data: which tensors one describes, by which names; what is broken, or made to take all
 * memory, is refused. Real ones, of every kind that torch writes, are in tests/cli.
 */
#include <errno.h>
#include <stdint.h>
#include "format/pickle.h"
#include "test.h"

#define NAME "a.pt"

/* Instructions, as texts of C; lengths are in front where a text follows. */
#define DICT "}"
#define LIST "]"
#define MARK "("
#define TUPLE "t"
#define FUNCTION(name) "ctorch._utils\n" name "\n"
#define STORAGE(class, key) \
	"(U\7storagectorch\n" class "\nU\1" key "U\3cpuK\12tQ"
/* A tensor of 2 x 3 at element 1. */
#define TENSOR(class, key) \
	FUNCTION("_rebuild_tensor_v2") "(" STORAGE(class, key) "K\1K\2K\3\x86K\3K\1\x86\x89}tR"

static struct pen_error err;
static struct pickle pickle;

static int parse(const char *bytes, size_t length)
{
	void *copy = malloc(length ? length : 1);	/* so that a step too far is seen */
	int rc;

	memcpy(copy, bytes, length);
	memset(&err, 0, sizeof(err));
	rc = pickle_init(&pickle, NAME, copy, length, 1000, &err);
	free(copy);
	return rc;
}

#define PARSE(text) parse(text, sizeof(text) - 1)

static void refused(const char *bytes, size_t length, const char *words)
{
	CHECK_EQ(parse(bytes, length), -EBADMSG);
	CHECK_EQ(err.domain, PEN_DOMAIN_FORMAT);
	if (!strstr(err.message, words))
		fprintf(stderr, "\"%s\" has no \"%s\"\n", err.message, words);
	CHECK(strstr(err.message, words) != NULL);
	CHECK(err.hint[0] && err.offset >= 1000);
	pickle_fini(&pickle);
}

#define REFUSED(text, words) refused(text, sizeof(text) - 1, words)

TEST(a_tensor_is_described)
{
	CHECK_EQ(PARSE("\x80\2" TENSOR("BFloat16Storage", "7") "."), 0);
	CHECK_EQ(pickle.count, 1);
	CHECK_TEXT(pickle.tensors[0].name, "");
	CHECK_TEXT(pickle.tensors[0].key, "7");
	CHECK_TEXT(pickle.tensors[0].location, "cpu");
	CHECK_TEXT(pickle.tensors[0].dtype->name, "bfloat16");
	CHECK_EQ(pickle.tensors[0].offset, 1);
	CHECK_EQ(pickle.tensors[0].rank, 2);
	CHECK_EQ(pickle.tensors[0].shape[0], 2);
	CHECK_EQ(pickle.tensors[0].shape[1], 3);
	CHECK_EQ(pickle.tensors[0].stride[0], 3);
	CHECK_EQ(pickle.tensors[0].stride[1], 1);
	pickle_fini(&pickle);
}

TEST(a_storage_need_not_say_where_it_was)
{
	CHECK_EQ(PARSE("\x80\2" FUNCTION("_rebuild_tensor_v2")
		       "((U\7storagectorch\nFloatStorage\nU\0010NK\12tQ"
		       "K\1K\2\x85K\1\x85\x89}tR."), 0);
	CHECK_EQ(pickle.count, 1);
	CHECK_TEXT(pickle.tensors[0].location, "");
	pickle_fini(&pickle);
}

TEST(names_are_keys_and_indices)
{
	CHECK_EQ(PARSE("\x80\2}(U\1a" TENSOR("FloatStorage", "0")
		       "K\5](K\1" TENSOR("FloatStorage", "1") "N}U\1x" TENSOR("LongStorage", "2")
		       "se\x88(" TENSOR("FloatStorage", "3") "tU\0}U\1z" TENSOR("FloatStorage", "4")
		       "su."), 0);
	CHECK_EQ(pickle.count, 5);
	CHECK_TEXT(pickle.tensors[0].name, "a");
	CHECK_TEXT(pickle.tensors[1].name, "5.1");
	CHECK_TEXT(pickle.tensors[2].name, "5.3.x");
	CHECK_TEXT(pickle.tensors[3].name, "?.0");
	CHECK_TEXT(pickle.tensors[4].name, "z");
	pickle_fini(&pickle);
}

TEST(a_tensor_with_two_names_is_there_twice)
{
	CHECK_EQ(PARSE("}(U\1a" TENSOR("FloatStorage", "0") "q\0U\1bh\0u."), 0);
	CHECK_EQ(pickle.count, 2);
	CHECK_TEXT(pickle.tensors[0].name, "a");
	CHECK_TEXT(pickle.tensors[1].name, "b");
	pickle_fini(&pickle);
}

TEST(things_are_looked_through)
{
	/* An object of a class with a state, a parameter, a dict that keeps an order. */
	CHECK_EQ(PARSE("}(U\1o" "cmy\nModel\n)\x81}U\1w" TENSOR("FloatStorage", "0") "sb"
		       "U\1p" FUNCTION("_rebuild_parameter") TENSOR("FloatStorage", "1")
		       "\x88}\x87R"
		       "U\1d" "ccollections\nOrderedDict\n)RU\1v" TENSOR("FloatStorage", "2") "s"
		       "U\1f" "cos\nsystem\nU\1xV\n\x86Ru."), 0);
	CHECK_EQ(pickle.count, 3);
	CHECK_TEXT(pickle.tensors[0].name, "o.w");
	CHECK_TEXT(pickle.tensors[1].name, "p");
	CHECK_TEXT(pickle.tensors[2].name, "d.v");
	pickle_fini(&pickle);
}

TEST(what_is_a_part_of_itself_ends)
{
	CHECK_EQ(PARSE("]q\0h\0ah\0a" TENSOR("FloatStorage", "0") "a."), 0);
	CHECK_EQ(pickle.count, 1);
	CHECK_TEXT(pickle.tensors[0].name, "2");
	pickle_fini(&pickle);
}

TEST(what_is_broken_is_refused)
{
	REFUSED("", "too soon");
	REFUSED("}", "too soon");
	REFUSED(".", "stack");
	REFUSED("}..", "after its end");
	REFUSED("\x80\7}.", "protocol");
	REFUSED("\xff.", "instruction");
	REFUSED("h\0.", "recall");
	REFUSED("}r\xff\xff\xff\xff.", "remembers");
	REFUSED("t.", "mark");
	REFUSED("}(U\1au.", "without a value");
	REFUSED("K\1K\1a.", "what has none");
	REFUSED("(a.", "stack");
	REFUSED("}(00.", "stack");
	REFUSED("NNR.", "without arguments");
	REFUSED("X\xff\xff\xff\xff" "a.", "too soon");
	REFUSED("\x8d\xff\xff\xff\xff\xff\xff\xff\xff" "a.", "too soon");
	REFUSED("\x8b\xff\xff\xff\x7f" "a.", "too soon");
	REFUSED("ctorch", "too soon");
	REFUSED("J\1", "too soon");
}

TEST(tensors_that_are_none_are_refused)
{
	static const char words[] = "not described";

#define CALL(arguments) FUNCTION("_rebuild_tensor_v2") arguments "R."
	REFUSED(CALL(")"), words);
	REFUSED(CALL("(K\1K\1))t"), words);
	REFUSED(CALL("(" STORAGE("NoStorage", "0") "K\1K\1\x85K\1\x85t"), words);
	REFUSED(CALL("(" STORAGE("FloatStorage", "0") "K\1K\1\x85)t"), words);
	REFUSED(CALL("(" STORAGE("FloatStorage", "0") "NK\1\x85K\1\x85t"), words);
	REFUSED(CALL("(" STORAGE("FloatStorage", "0") "J\xff\xff\xff\xffK\1\x85K\1\x85t"), words);
	REFUSED(CALL("(" STORAGE("FloatStorage", "0") "K\1J\xff\xff\xff\xff\x85K\1\x85t"), words);
	REFUSED(CALL("(" STORAGE("FloatStorage", "0") "K\1K\1\x85N\x85t"), words);
	REFUSED(CALL("(" STORAGE("FloatStorage", "0") "K\1U\1a\x85K\1\x85t"), words);
	REFUSED(CALL("(NQK\1K\1\x85K\1\x85t"), words);
}

/* ---------------------------------------------------------------------------------- bombs -- */

/* Each list holds the one before twice: few bytes, and a tensor under 2^60 names. */
TEST(what_is_shared_too_often_is_refused)
{
	char bytes[1000], *at = bytes;

	memcpy(at, TENSOR("FloatStorage", "0"), sizeof(TENSOR("FloatStorage", "0")) - 1);
	at += sizeof(TENSOR("FloatStorage", "0")) - 1;
	for (int i = 0; i < 60; i++) {
		memcpy(at, "q\0" "0](h\0h\0e", 10);
		at[1] = at[6] = at[8] = (char)i;
		at += 10;
	}
	*at++ = '.';
	refused(bytes, (size_t)(at - bytes), "can be");
}

TEST(what_is_nested_too_deeply_is_refused)
{
	size_t depth = 100000;
	char *bytes = malloc(2 * depth + 1);

	memset(bytes, ']', depth);
	memset(bytes + depth, 'a', depth);
	bytes[2 * depth - 1] = '.';
	refused(bytes, 2 * depth, "nested");
	free(bytes);
}

TEST(what_has_too_many_parts_is_refused)
{
	size_t count = 20u << 20;
	char *bytes = malloc(count);

	memset(bytes, ']', count);
	refused(bytes, count, "more parts");
	free(bytes);
}

TEST_MAIN
