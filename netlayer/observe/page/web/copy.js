// Copies what needs no build into dist/.
import { copyFileSync } from "node:fs";

copyFileSync("src/index.html", "dist/index.html");
